"""Looking at a run: how the view of protocol/view.py is judged, and drawn for a terminal, Prometheus and a browser."""
