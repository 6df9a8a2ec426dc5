"""Tests of the four packages and of what they promise together."""
