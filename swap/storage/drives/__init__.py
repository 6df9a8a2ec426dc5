"""An SSD: the directory of a process on it, how fast it is, and what training writes to it."""
