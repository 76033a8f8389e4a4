"""What a recomputation needs to repeat a forward exactly."""
