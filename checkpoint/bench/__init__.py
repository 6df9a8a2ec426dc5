"""`ckpt-bench`: how fast checkpoints are saved and loaded here, beside the disks and other systems.

From arguments (`conditions/`) comes a list of contestants (`measure/schedule.py`): systems that
save and load a state (`systems/`). They take turns (`measure/measuring.py`), and what they took
becomes figures (`measure/results.py`), shown as a table, a plot and JSON (`output/`).
"""
