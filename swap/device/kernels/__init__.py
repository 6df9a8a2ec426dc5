"""Kernels of updates for the memory of a compute device, with the bits of those in C."""
