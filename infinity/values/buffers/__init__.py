"""Buffers of a model inside the block, and what becomes of them after it."""
