"""LIVES: a slave, which holds layers and moves them."""
