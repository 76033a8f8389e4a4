"""Send values and gradients from stage to stage."""
