"""Systems taking turns, and what their times come to."""
