"""Optimizers as users choose them, and a step as the tiers carry it out."""
