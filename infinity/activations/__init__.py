"""Saved tensors that are not weights: kept, in host memory, or on NVMe."""
