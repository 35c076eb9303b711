"""The demonstration of `dips demo`: a small language model, its data, two unequal clusters, plots."""
