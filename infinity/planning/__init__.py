"""Where every byte of a model would live, and what a step would cost."""
