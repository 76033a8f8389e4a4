"""GPipe as an ``nn.Module``: its arguments, layers, partitions and devices, and the checks of all of them."""
