"""Snapshots of a model in training: durable restore points that copy nothing that is on NVMe."""
