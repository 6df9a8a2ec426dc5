"""What the bytes of a checkpoint mean: pure, no I/O."""
