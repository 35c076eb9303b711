"""Training inside one cluster, for which no parameter server is needed (docs/guides/inside.md)."""
