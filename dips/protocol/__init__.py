"""DECIDES: the pure part of Di-PS. Standard library only; no clock, socket, thread or log. Time is an argument."""
