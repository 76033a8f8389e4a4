"""What travels between stages: leaves, aliases, shared memory, constants."""
