"""Training inside one cluster, or several: what to run on unequal machines, and meshes without a parameter server."""
