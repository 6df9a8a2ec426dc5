"""What this process knows of checkpoints that it has seen: manifests, and damage."""
