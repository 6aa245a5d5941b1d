"""Training: the loop, the engines that run a step, and the state that survives it."""
