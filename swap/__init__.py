"""Tensors and tiers: where training state lives, how it moves, and how it is updated."""
