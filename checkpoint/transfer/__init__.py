"""Bytes in flight between tensors and data files."""
