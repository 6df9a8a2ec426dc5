"""What lives in which tier and moves when: decided by arithmetic, nothing is moved."""
