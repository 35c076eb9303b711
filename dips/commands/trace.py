"""The command `dips trace`: writes what a run's timelines tell as a trace for Perfetto or for OpenTelemetry."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dips.errors import ConfigError
from dips.files import write_output
from dips.telemetry import timeline
from dips.view.trace import OFTEN, RunTrace, make_trace, to_chrome, to_otlp


class TraceFormat(StrEnum):
    """The formats that `dips trace` writes."""

    CHROME = "chrome"
    OTLP = "otlp"


def trace(
    directories: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR...", help="Directories of master, slaves and agents, or ones above them; or their files."
        ),
    ],
    output: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("trace.json"),
    layout: Annotated[
        TraceFormat, typer.Option("--format", help="chrome: for ui.perfetto.dev; otlp: for a collector of traces.")
    ] = TraceFormat.CHROME,
    push: Annotated[
        str, typer.Option("--push", metavar="ID", help="This push alone, as east/1#3, with its round and its pull.")
    ] = "",
) -> None:
    """Write a trace of a run: pushes, rounds and pulls through agents, ranks, master and slaves.

    Read from the files timeline.jsonl that daemons keep in their directories; copy those of other machines to this one
    first. Nothing is asked of the daemons, and the run may be going on. A process has a track for each thing that it
    does; a cluster has one for each rank, whose bytes its slaves have timed. Arrows lead from each order to its slave,
    and from a push to the slaves, and from its round to its pull. `dips history --json` and the logs name pushes.

    Heartbeats do not tell how clocks of machines differ. It is estimated, as in NTP, from the shortest wait of one
    process for another (a slave's order, a push's commit); a clock that must be wrong is moved, and that is printed. A
    clock that was set while the run went on is shown wrong before that.

    Exit codes: 0 written; 1 no timeline names this push; 78 there is no timeline, or there are those of several runs.

    \b
    Example:
      dips trace master slave-0 slave-1 west --out trace.json
      dips trace runs/demo-1 --push fast/1#3 --format otlp --out push.json
    """
    marks = read_timelines(directories)
    try:
        made = make_trace(marks, push)
    except LookupError as error:
        print(error.args[0], file=sys.stderr)
        raise typer.Exit(1) from None
    written = to_chrome(made) if layout is TraceFormat.CHROME else to_otlp(made, marks[0]["run"])
    write_output(output, json.dumps(written, allow_nan=False))
    for line in describe_offsets(made):
        print(line)
    print(f"wrote {output}: {len(made.spans)} spans, {len(made.flows)} flows")


def read_timelines(directories: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of all timelines in and below the directories that a trace needs. Raises ConfigError unless all
    are of one run.
    """
    marks = [mark for path in _find_timelines(directories) for mark in _read_needed(path)]
    runs = sorted({mark["run"] for mark in marks})
    if len(runs) != 1:
        got = f"those of the runs {', '.join(runs)}" if runs else "none"
        raise ConfigError(f"RUN_DIR: expected {timeline.FILE} of one run in or below these directories, got {got}")
    return marks


def _read_needed(path: Path) -> list[dict[str, Any]]:
    """Return a timeline's lines without those of steps: they are not drawn, and a full timeline of them would take a GB
    of memory. One is kept if it is the last, until which goes on what has no end.
    """
    needed = list[dict[str, Any]]()
    for mark in timeline.read_marks(path):
        if "run" in mark:
            if needed and needed[-1].get("kind") in OFTEN:
                needed.pop()
            needed.append(mark)
    return needed


def _find_timelines(directories: Iterable[Path]) -> list[Path]:
    found = dict[Path, None]()
    for given in directories:
        if not given.exists():
            raise ConfigError(f"RUN_DIR: {given} does not exist")
        below = [given] if given.is_file() else sorted(given.rglob(timeline.FILE))
        found |= dict.fromkeys(path.resolve() for path in below)
    older = {timeline.older_path(path) for path in found}  # which `read_marks` reads with the newer one
    return [path for path in found if path not in older]


def describe_offsets(made: RunTrace) -> list[str]:
    """Say which clocks were moved, and by how much."""
    return [
        f"{role} {name}: its clock is moved by {offset.seconds:+.4f} s, ± {offset.error_s:.4f} s"
        for (role, name), offset in made.offsets.items()
        if offset.seconds
    ]
