"""What a disk may hold after the power was cut: recorded, enumerated, tried.

`tracing` sees what a program asks of the kernel, and `recording` what that does to files; `disk`
says what of it may be on the disk at each moment, and `states` chooses among that. `promises` are
what has to hold then, `scenarios` the programs. `trials` puts states on a disk and looks.
"""
