"""What heads do: relevance, roles, and what is lost without them."""
