"""Many tensors of a manifest at once, field by field: what is usual in a few passes over all."""
