"""Inputs that parsers were not made for: `mutations` makes them of those that led somewhere new, by
`tracing`; `targets` are the parsers, and what they may raise; `rounds` tries one after the other.

`fuzz_parsers.py` is the command line.
"""
