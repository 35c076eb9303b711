"""The HTTP port of a daemon: probes, metrics, and on the master the page. It reads and never changes anything."""
