"""A simulated run: the deciding and computing parts of Di-PS as they are, among simulated clusters, links and disks."""
