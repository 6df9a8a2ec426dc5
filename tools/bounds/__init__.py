"""What a step takes at least and at most, by arithmetic; ``bound_steps.py`` is the command line."""
