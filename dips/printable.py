"""Text from outside, as it may be shown: on a terminal, in a log, in a file that somebody will `cat`.

Escape sequences move cursors and hide lines, newlines forge them, marks of writing direction turn them round. What does
not print is spelled (`\\x1b`), so that it is seen and does nothing. Pure.
"""

from __future__ import annotations

from typing import Any


def make_printable(text: str) -> str:
    """`text` on one line, with everything spelled that would not print."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def make_lines_printable(text: str) -> str:
    """The same for what may have several lines, since it is our own: a traceback, an advice."""
    return "\n".join(make_printable(line) for line in text.split("\n"))


def format_finding(verdict: str, what: str, seen: str, remedy: str) -> str:
    """A line of a check: "ok", "note" or "FAIL", what was looked at, what was seen; below it what to do.

    Not a table: paths and addresses stay whole, to be copied.
    """
    return make_lines_printable(f"{verdict:<4}  {what}: {seen}" + (f"\n      {remedy}" if remedy else ""))


def make_tree_printable(value: Any) -> Any:
    """The same for every text, keys too, of what was read from JSON."""
    if isinstance(value, str):
        return make_printable(value)
    if isinstance(value, dict):
        return {make_tree_printable(key): make_tree_printable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [make_tree_printable(item) for item in value]
    return value
