"""A step of training replayed in simulated time; ``simulate.py`` is its command line."""
