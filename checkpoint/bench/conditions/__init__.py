"""What is measured under: the command line, directories, page cache, machine, settings, states."""
