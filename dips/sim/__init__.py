"""A simulated run: the real cores and kernels of Di-PS among simulated clusters, links and disks."""
