"""Weights near the compute device: fetched before they are used, kept while that is worth it."""
