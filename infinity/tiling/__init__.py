"""Large layers cut into tiles, each a parameter of its own."""
