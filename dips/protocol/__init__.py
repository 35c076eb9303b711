"""All decisions of a master, as pure functions: standard library only; no clock, socket, thread or log."""
