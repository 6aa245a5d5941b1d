"""What is done with trained weights: evaluate, generate, export, compare."""
