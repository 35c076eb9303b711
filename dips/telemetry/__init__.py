"""Logs, the timeline, metrics, status."""
