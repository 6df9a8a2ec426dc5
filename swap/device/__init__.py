"""The compute device: what it has to do, CUDA doing it, and a slab of its memory."""
