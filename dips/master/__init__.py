"""The master: a daemon that makes every decision of a run and holds no tensors."""
