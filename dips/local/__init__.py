"""Runs of which every process is on this machine: `dips up` and `dips demo`."""
