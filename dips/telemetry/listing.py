"""A table for terminals of any width: short cells in columns, sentences under their row; no word is cut.

Columns are in the order of their importance. Those for which a narrow terminal has no room are printed under each row,
with their names, or are left out and listed once (`strict`: one line for each row); a name longer than a line is
folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from dips.printable import make_printable

GAP = 2  # between two columns, and before lines under a row


@dataclass(frozen=True, slots=True)
class Column:
    """A column of words if `left`, else of numbers, which are aligned to the right."""

    name: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class ListingRow:
    """A cell for each column, and lines of text under the row."""

    cells: tuple[str | Text, ...]
    notes: tuple[str, ...] = ()
    style: str = ""


class Listing:
    """A table that rich can print; it adapts to the width when it is printed."""

    def __init__(
        self, title: str, columns: Sequence[Column], rows: Sequence[ListingRow], strict: bool = False, more: int = 0
    ) -> None:
        """`more` is the number of rows that the caller left out."""
        self._title, self._columns, self._rows, self._strict, self._more = title, columns, rows, strict, more

    def __len__(self) -> int:
        return len(self._rows)

    def shorten_to(self, count: int) -> Listing:
        """Return a listing of at most `count` rows; those with notes come first, if not all have room."""
        if len(self._rows) <= count:
            return self
        kept = sorted(self._rows, key=lambda row: not any(row.notes))[:count]
        return Listing(self._title, self._columns, kept, self._strict, self._more + len(self._rows) - count)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [[_to_text(cell) for cell in row.cells] for row in self._rows]
        widths = [
            max(len(column.name), *(line[i].cell_len for line in cells)) if cells else len(column.name)
            for i, column in enumerate(self._columns)
        ]
        shown = _that_fit(widths, options.max_width)
        yield Text(self._title, style="bold")
        if self._rows:
            yield self._draw_line([Text(column.name) for column in self._columns[:shown]], widths, "bold")
        for row, texts in zip(self._rows, cells, strict=True):
            yield self._draw_line(texts[:shown], widths, row.style)
            rest = zip(self._columns[shown:], texts[shown:], strict=True)
            aside = "" if self._strict else ", ".join(f"{column.name} {text.plain}" for column, text in rest)
            for note in (*row.notes, aside):
                if note:
                    yield Padding(
                        Text(make_printable(note), style="dim", overflow="fold"), (0, 0, 0, GAP), expand=False
                    )

        if self._more:
            yield Text(f"and {self._more} more", style="dim")
        left_out = ", ".join(column.name for column in self._columns[shown:])
        if self._strict and self._rows and left_out:
            yield Text(f"in a wider terminal, or with --json: {left_out}", style="dim")

    def _draw_line(self, texts: Sequence[Text], widths: Sequence[int], style: str) -> Text:
        line = Text(style=style, overflow="fold")
        for i, (text, width) in enumerate(zip(texts, widths, strict=False)):
            padding = " " * (width - text.cell_len)
            line.append(" " * GAP if i else "")
            line.append_text(Text.assemble(text, padding) if self._columns[i].left else Text.assemble(padding, text))
        line.rstrip()
        return line


def _to_text(cell: str | Text) -> Text:
    return Text(make_printable(cell)) if isinstance(cell, str) else cell


def _that_fit(widths: Sequence[int], room: int) -> int:
    """Return how many columns, from the first on, fit beside each other; at least 1."""
    shown, taken = 0, -GAP
    for width in widths:
        taken += GAP + width
        if taken > room:
            break
        shown += 1
    return max(1, shown)
