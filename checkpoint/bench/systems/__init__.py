"""What is compared: the library itself, its engine alone, other libraries and programs."""
