"""The command `dips logs`: prints the logs of a run's processes on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.new import RUN
from dips.config import load_run
from dips.errors import ConfigError
from dips.local.run import BLOCK, LOGS, read_tail
from dips.printable import make_lines_printable

LOOK_EVERY_S = 0.3


def logs(
    names: Annotated[
        list[str] | None, typer.Argument(help="master, or the name of a slave or cluster; default all.")
    ] = None,
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file.")] = Path(RUN),
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Show the newest N lines of each log.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they are written, until Ctrl-C.")
    ] = False,
) -> None:
    """Print the newest lines of the logs that `dips up` writes, and of the slaves that the master started.

    Daemons started in other ways log to standard error: see journalctl, kubectl logs or the job's output.

    Exit code 78 if there is no such log.

    \b
    Example:
      dips logs
      dips logs slave-0 -n 100 --follow
    """
    found = _choose(_find_logs(config), names or [])
    width = max(map(len, found))
    read = {name: _print_tail(name, path, lines, width) for name, path in found.items()}
    try:
        while follow:
            read = {name: _print_from(name, path, read[name], width) for name, path in found.items()}
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        return


def _find_logs(config: Path) -> dict[str, Path]:
    """Return the log of each process by name; of two, that of a slave that was started in another way before, the one
    written last. Raises ConfigError if there is none.
    """
    run_file = load_run(config)
    places = [config.with_name(LOGS), run_file.master.directory / "slaves"]
    found = dict[str, Path]()
    for path in (path for place in reversed(places) for path in sorted(place.glob("*.log"))):
        known = found.get(path.stem)
        if known is None or known.stat().st_mtime <= path.stat().st_mtime:
            found[path.stem] = path
    if not found:
        raise ConfigError(
            f"expected logs in {places[0]}, where `dips up` writes them, or in {places[1]}, where the master writes "
            "those of slaves that it starts; other daemons log to standard error"
        )
    return found


def _choose(found: Mapping[str, Path], names: Iterable[str]) -> dict[str, Path]:
    missing = [name for name in names if name not in found]
    if missing:
        raise ConfigError(f"no log of {', '.join(missing)}; there are those of {', '.join(found)}")
    return {name: found[name] for name in names} or dict(found)


def _print_tail(name: str, path: Path, lines: int, width: int) -> int:
    """Print the last lines; return the offset after them."""
    last, size = read_tail(path, lines)
    _print_lines(name, last, width)
    return size


def _print_from(name: str, path: Path, offset: int, width: int) -> int:
    """Print the complete lines after `offset`; return the offset after them."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # moved away: the next one begins anew
        return 0
    with file:
        if file.seek(0, os.SEEK_END) < offset:  # truncated, or replaced
            offset = 0
        file.seek(offset)
        text = file.read(BLOCK)
    whole = text[: text.rfind(b"\n") + 1] or (text if len(text) == BLOCK else b"")
    _print_lines(name, whole.splitlines(), width)
    return offset + len(whole)


def _print_lines(name: str, lines: Iterable[bytes], width: int) -> None:
    for line in lines:
        print(f"{name:<{width}} | {make_lines_printable(line.decode(errors='replace'))}", flush=True)
