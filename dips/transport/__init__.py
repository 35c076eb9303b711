"""MOVES: pools, lanes, streams of the data flow; channels of the control flow."""
