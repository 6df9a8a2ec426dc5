"""What comes in between (interrupts, forks, failures): what they must not cut, how it is undone."""
