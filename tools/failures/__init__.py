"""One operation made to fail, whichever: `interposed` makes it, `attempts` are what it is made in.

`fail_nth.py` is the command line.
"""
