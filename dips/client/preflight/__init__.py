"""`dips-client check`: everything that can be known before a training job is started.

probe measures the way to a lane, agreement compares what must be equal, checks makes the rows, app asks and prints.
"""
