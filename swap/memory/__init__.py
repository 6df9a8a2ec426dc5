"""Host memory: slabs of it, the bounce buffer of direct I/O, and what the C library keeps of it."""
