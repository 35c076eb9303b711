"""The live view of a demo: the master's status drawn once a second, or without a terminal a line every ten seconds."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dips.protocol.view import RunView
from dips.view import terminal

PLAIN_EVERY_S = 10.0
NEWS_LINES = 8


class Watch:
    """Draws the status and the events of the demo."""

    def __init__(self, seconds: float, console: Console | None = None) -> None:
        self._console = console or Console()
        self._seconds, self._begun = seconds, time.monotonic()
        self._news: deque[str] = deque(maxlen=NEWS_LINES)
        self._status: RunView | None = None
        self._drawn_at = -PLAIN_EVERY_S
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def print_event(self, text: str) -> None:
        """Show an event of the demo."""
        line = f"[{self._elapsed_s():5.0f} s] {text}"
        self._news.append(line)
        if self._live:
            self._live.update(self._draw_status(), refresh=True)
        else:
            self._console.print(line, highlight=False, soft_wrap=True)

    def show_status(self, status: RunView | None) -> None:
        """Draw a status; None: the master did not answer this time."""
        if self._live:
            self._status = status or self._status
            self._live.update(self._draw_status(), refresh=True)
        elif status and time.monotonic() - self._drawn_at >= PLAIN_EVERY_S:
            self._drawn_at = time.monotonic()
            line = f"[{self._elapsed_s():5.0f} s] {terminal.one_line(status)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun

    def _draw_status(self) -> RenderableType:
        done = min(1.0, self._elapsed_s() / self._seconds)
        bar = Text("▰" * round(40 * done) + "▱" * round(40 * (1 - done)) + f" {self._elapsed_s():.0f} s", style="cyan")
        news = Panel("\n".join(self._news) or " ", title="the demo", title_align="left")
        return Group(bar, terminal.render_status(self._status), news) if self._status else Group(bar, news)
