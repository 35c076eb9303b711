"""The library inside every training rank: freezes, pushes, pulls and installs this rank's shard."""
