"""Training steps in simulated time: the library's own tiers over hardware that only takes time."""
