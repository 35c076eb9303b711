"""LIVES: the master, which decides and holds no tensors."""
