"""Optimizer state of parameters that are the program's: where it is, and its way past them."""
