"""TELLS: logs, the timeline, metrics, status."""
