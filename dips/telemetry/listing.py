"""A table for terminals of any width: what is short in columns, what is prose under its row; no word is cut.

Columns come in the order of their importance. Those that a narrow terminal has no room for stand under each row, by
their names, or are left out and named once (`strict`: a line for each row); a name longer than a line is folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from dips.printable import make_printable

GAP = 2  # between two columns, and before what stands under a row


@dataclass(frozen=True, slots=True)
class Column:
    """`left`: it holds words; else numbers, whose last digits stand under each other."""

    name: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class ListingRow:
    """A cell for each column, and lines of prose."""

    cells: tuple[str | Text, ...]
    notes: tuple[str, ...] = ()
    style: str = ""


class Listing:
    """What rich can print; it looks at the width only then."""

    def __init__(
        self, title: str, columns: Sequence[Column], rows: Sequence[ListingRow], strict: bool = False, more: int = 0
    ) -> None:
        """`more`: rows that the caller left out, to be counted."""
        self._title, self._columns, self._rows, self._strict, self._more = title, columns, rows, strict, more

    def __len__(self) -> int:
        return len(self._rows)

    def shorten_to(self, count: int) -> Listing:
        """At most so many rows; those with something to say come first, if not all have room."""
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
    """How many columns, from the first on, have room beside each other; at least the first is shown."""
    shown, taken = 0, -GAP
    for width in widths:
        taken += GAP + width
        if taken > room:
            break
        shown += 1
    return max(1, shown)
