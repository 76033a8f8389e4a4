"""Programs that need a GPU to be of use, and also run on the CPU, small, so that a mistake in them is found there."""
