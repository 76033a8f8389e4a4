"""GPipe as a module: its arguments, layers, partitions and devices, and what it refuses."""
