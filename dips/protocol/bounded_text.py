"""Text of an operator, as the ledger, the status and the terminal may have it."""

from __future__ import annotations

MOST_TEXT = 300  # characters of a caller, of arguments, of an outcome
REPLACEMENT = "�"


def cut_text(text: str, most: int = MOST_TEXT) -> str:
    """At most so many characters, and none that moves a cursor or turns the direction of a line."""
    return "".join(c if c.isprintable() else REPLACEMENT for c in text[:most])
