"""Runs whose processes are all on this machine: `dips up` and `dips demo`."""
