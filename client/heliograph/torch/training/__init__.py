"""Training: a module's forward and backward pass and the optimizer's step as one graph."""
