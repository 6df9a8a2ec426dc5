"""What I/O needs of the process that it runs in: threads, descriptors, its share of the machine."""
