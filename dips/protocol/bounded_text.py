"""Text of an operator, cut to a length and to printable characters for the ledger, the status and the terminal."""

from __future__ import annotations

MOST_TEXT = 300  # characters of a caller, of arguments or of an outcome
REPLACEMENT = "�"


def cut_text(text: str, most: int = MOST_TEXT) -> str:
    """Cut to `most` characters; replace those that are not printable (cursor movements, bidirectional controls)."""
    return "".join(c if c.isprintable() else REPLACEMENT for c in text[:most])
