"""Which heads go, when, and how they are cut out."""
