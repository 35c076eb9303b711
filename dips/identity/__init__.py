"""Identities of processes: names in certificates, an offline authority that signs them, and the rights of each role."""
