"""What snapshots keep on the SSDs beyond the process that wrote it."""
