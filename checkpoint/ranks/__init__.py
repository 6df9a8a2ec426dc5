"""Agreement between the processes that save one checkpoint."""
