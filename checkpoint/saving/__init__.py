"""`save` and `save_async`, from the state to the durable checkpoint."""
