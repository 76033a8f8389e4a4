"""Random models that hand containers of all kinds of tensors from layer to layer, and random ways to train them."""
