"""`dips-client check`: checks everything that can be known before a training job is started.

probe measures the connection to a lane, agreement builds our manifest, checks makes the rows, app runs and prints them.
"""
