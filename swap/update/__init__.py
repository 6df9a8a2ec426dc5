"""The update of subgroups: read, kernel, write-back, publish, several of them at once."""
