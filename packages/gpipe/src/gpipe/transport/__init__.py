"""How values and gradients get from stage to stage."""
