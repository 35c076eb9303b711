"""The master's page: read-only, one file, one bounded JSON document a second."""
