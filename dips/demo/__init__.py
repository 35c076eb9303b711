"""The demonstration: a small language model, its data, two unequal clusters, plots."""
