"""Who writes and reads which bytes: decided before anything is touched."""
