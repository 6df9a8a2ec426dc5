"""What a model consists of: its parameters as records, and what stands in their place."""
