"""SPELLS: frames, chunks, and protobuf messages ⇄ events."""
