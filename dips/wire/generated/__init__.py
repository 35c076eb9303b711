"""Stubs of protos/dips/v1, written by protos/generate: never edited."""
