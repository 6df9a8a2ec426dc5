"""Where the bytes of a save come from and those of a load go to: tensors in memory."""
