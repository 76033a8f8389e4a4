"""Values that are sent between stages: leaves, aliases, shared memory, constants."""
