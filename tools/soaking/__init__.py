"""Programs drawn by a seed, trained undisturbed in memory, and disturbed in every way offloaded.

`programs` draws, `models` makes what is trained, `memory` trains it undisturbed, `lives` trains it
offloaded, in processes that fail, are killed and go on (`running`), and `judging` holds one against
the other.
`soak.py` is the command line.
"""
