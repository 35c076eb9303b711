"""The library inside every training rank: it freezes, pushes, pulls and installs this rank's shard."""
