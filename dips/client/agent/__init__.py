"""The agent: the process beside one training job that speaks to the master for its cluster. Never imports torch."""
