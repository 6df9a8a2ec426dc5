"""`ckpt-bench`: how fast checkpoints are saved and loaded here, beside the disks and other systems.

From arguments (arguments.py) comes a list of contestants (schedule.py): systems that save and load
a state (systems.py, raw.py, peers.py, fastpersist.py, fio.py). They take turns (measuring.py), and
what they took becomes figures (results.py), shown as a table, a plot and JSON.
"""
