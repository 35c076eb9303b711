"""The messages between an agent and its ranks, and how the two find and authenticate each other."""
