"""Tests of `infinity.offload` as its users meet it."""
