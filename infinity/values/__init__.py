"""Values into the tiers and out of them: checkpoints of a model in training, its buffers."""
