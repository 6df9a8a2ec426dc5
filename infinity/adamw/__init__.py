"""`OffloadedAdamW`: an optimizer for models that are in memory, its own state on NVMe."""
