"""Checks of a cluster's host and its peers before a training job is started, for `dips check`.

probe measures the connection to a lane, agreement builds our manifest, checks makes the rows, app asks the peers.
"""
