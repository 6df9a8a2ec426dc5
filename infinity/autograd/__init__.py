"""What a model looks like inside the block: hooks, weights in place, saved weights."""
