"""What a parameter is while its values are elsewhere: placeholder, operations, gradient."""
