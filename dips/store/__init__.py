"""Versions on disks and in object stores: one layout for snapshots, mirrors and the first model."""
