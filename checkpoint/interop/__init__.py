"""Checkpoints as other libraries know them: safetensors, zarr, references, bytes."""
