"""Tests of the I/O engine."""
