"""The same model, schedule and checkpoint in several processes."""
