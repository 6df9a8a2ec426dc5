"""`load`, `verify` and tensors read one by one."""
