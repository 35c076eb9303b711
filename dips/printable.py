"""Escaping of text from outside for terminals, logs and files; names in a message, and a check's finding as text.

Escape sequences move cursors and hide lines, newlines forge lines, bidirectional marks reverse them. Characters that
do not print are escaped (`\\x1b`), so that they are visible and have no effect. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OK, NOTE, FAIL = "ok", "note", "FAIL"


def make_printable(text: str) -> str:
    """Return `text` on one line, with all characters escaped that do not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def make_lines_printable(text: str) -> str:
    """Escape each line of our own text, which may have several: a traceback, an advice."""
    return "\n".join(make_printable(line) for line in text.split("\n"))


def shorten(text: str, most: int) -> str:
    """Return `text` in at most `most` characters, the last of which is an ellipsis if something is cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def join_some(names: Sequence[str], most: int = 5) -> str:
    """Join names for a message, at most so many, and count the others."""
    left = len(names[most:])
    return ", ".join(names[:most]) + (f" and {left} more" if left else "")


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """The result of one check: its subject, the verdict (OK, NOTE or FAIL), what was seen, and what to do."""

    what: str
    verdict: str
    seen: str
    remedy: str = ""
    silent: bool = False  # a peer does not answer, which may pass; otherwise something is configured wrongly

    def __str__(self) -> str:
        """Format it on one line, the remedy below; not as a table, so that paths and addresses stay whole for
        copying.
        """
        remedy = f"\n      {self.remedy}" if self.remedy else ""
        return make_lines_printable(f"{self.verdict:<4}  {self.what}: {self.seen}{remedy}")


def make_tree_printable(value: Any) -> Any:
    """Escape every text, including keys, in a value read from JSON."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, dict):
        return {make_tree_printable(key): make_tree_printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [make_tree_printable(item) for item in value]
    return value
