"""What survives when disks, memory and processes fail."""
