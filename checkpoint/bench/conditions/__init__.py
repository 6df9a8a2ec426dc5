"""Conditions of a measurement: options, directories, page cache, machine, settings, states."""
