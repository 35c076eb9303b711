"""LIVES: the agent beside a torchrun job, and the library in every rank."""
