"""Gradients on their way from the backward pass to the update."""
