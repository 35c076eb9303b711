"""What every benchmark shares: its command line, medians, the table on the terminal, the report that record.py keeps.

    def measure(bench: Bench) -> None:
        took = bench.together({"copy": copy, "memcpy": memcpy})         # medians in seconds, measured in turn
        bench.row("copy", size / took["copy"], "B/s", against="memcpy", of=size / took["memcpy"], least=0.8)

    if __name__ == "__main__":
        main("copy", __doc__, measure)

A row's ratio says how much of what it is held against it reaches: more is better, and it holds if ratio ≥ least. Where
a time or a size must stay below a bound, `less=True` turns the ratio over (at most twice the time: least 0.5). The
harness knows nothing of what is measured.

SIGTERM ends a benchmark as Ctrl-C does, through its `with` and `finally`: what it started and made (processes,
namespaces) goes with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from benchmarks.record import ROOT, TABLE, BenchRow, append_runs, make_table, shown

END_S = 60.0  # for one to end its processes and take down its namespaces
RANK_END_S = 10.0  # for a rank that has told its result, or whose step did not end
RECORDED = ("benchmarks/results", "benchmarks/README.md")  # what append_runs and the table write
PACKAGES = ("numpy", "numba", "torch", "pyzmq", "grpcio", "xxhash")


class NothingMeasured(Exception):
    """What this machine lacks for a benchmark, which ends with a note."""


class Seconds(float):
    """What a work says it took; any other result is the work's own business."""


@dataclass(slots=True)
class Bench:
    """One benchmark under way: collects rows and notes, and says on standard error what it is doing."""

    name: str
    quick: bool
    args: argparse.Namespace
    console: Console
    rows: list[BenchRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        """How often to measure before the median is taken."""
        return 3 if self.quick else 5

    def row(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        against: str = "",
        of: float | None = None,
        least: float | None = None,
        less: bool = False,
    ) -> BenchRow:
        """Add a row: `value` held against `of`, in the same unit; `less` says that a smaller value is better."""
        ratio = None if of is None else (of / value if less else value / of)
        holds = least is None or (ratio is not None and ratio >= least)
        made = BenchRow(name, value, unit, against, ratio, least, holds, less, of=of)
        self.rows.append(made)
        return made

    def note(self, text: str) -> None:
        """Keep a sentence for the table's foot and the log: how bytes are counted, what the limit is."""
        self.notes.append(text)

    def skip_if(self, lacks: str | None) -> None:
        """End the benchmark here if the machine lacks something."""
        if lacks:
            raise NothingMeasured(lacks)

    def say(self, text: str) -> None:
        """Show progress."""
        self.console.print(f"[dim]{self.name}: {text}[/dim]", highlight=False)

    def together(
        self, works: Mapping[str, Callable[[], object]], *, runs: int | None = None, warm: int = 1
    ) -> dict[str, float]:
        """Return the median seconds of each work; they run in turn, so that a slow minute slows all of them.

        A work that returns Seconds has measured those that count by itself.
        """
        took: dict[str, list[float]] = {name: [] for name in works}
        for run in range(-warm, self.runs if runs is None else runs):
            for name, work in works.items():
                begun = time.perf_counter()
                own = work()
                if run >= 0:
                    took[name].append(own if isinstance(own, Seconds) else time.perf_counter() - begun)
        return {name: statistics.median(times) for name, times in took.items()}


def main(
    name: str,
    doc: str | None,
    measure: Callable[[Bench], None],
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run one benchmark as a program; exit code 0 if every row holds, 1 if one does not, 2 for wrong words."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks.{name}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: a look, not a measurement")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--log", action="store_true", help="append the rows to benchmarks/results")
    if arguments is not None:
        arguments(parser)
    args = parser.parse_args(argv)
    end_in_order()
    bench = Bench(name, args.quick, args, Console(stderr=True))
    begun, measured = time.monotonic(), commit()
    try:
        measure(bench)
    except NothingMeasured as lacks:
        bench.note(f"nothing was measured: {lacks}")
    took_s = time.monotonic() - begun
    Console().print(table(bench.name, bench.rows, bench.notes))
    logs = args.log and bool(bench.rows)
    result = report(bench, took_s, measured) if args.json is not None or logs else {}
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    if logs:
        append_runs([(name, result)])
        TABLE.write_text(make_table())
    sys.exit(0 if all(row.holds for row in bench.rows) else 1)


def end_in_order() -> None:
    """Turn SIGTERM into SystemExit, so that whatever is under way is unwound; more of them change nothing."""

    def unwind(number: int, _: object) -> NoReturn:
        # A handler and not SIG_IGN, which the programs that clean up would inherit.
        signal.signal(number, lambda *_: None)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def end_process(process: subprocess.Popen[Any], within_s: float = END_S) -> None:
    """End a process that is not over in order, for only it knows what it made, or by SIGKILL where it does not end."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def play_ranks(
    play: Callable[..., Any], given: Sequence[tuple[Any, ...]], within_s: float, start: str = "fork"
) -> list[Any]:
    """Call `play(*given[rank])` in a process for each rank, which are one gloo group; return what they returned. No
    process is left.
    """
    context = get_context(start)
    queue = context.Queue()
    with TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=_play_rank, args=(play, rank, len(given), words, directory, queue))  # type: ignore[attr-defined]
            for rank, words in enumerate(given)
        ]
        for process in ranks:
            process.start()
        try:
            told = dict(queue.get(timeout=within_s) for _ in ranks)
        finally:
            for process in ranks:
                process.join(RANK_END_S)
                if process.is_alive():
                    process.kill()
                    process.join()
    return [told[rank] for rank in range(len(given))]


def _play_rank(
    play: Callable[..., Any], rank: int, ranks: int, words: tuple[Any, ...], directory: str, queue: Any
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    queue.put((rank, play(*words)))
    dist.barrier()
    dist.destroy_process_group()


def report(bench: Bench, took_s: float, measured: str) -> dict[str, Any]:
    """The file of a benchmark: machine, commit, rows; beside them its notes and how long it took.

    measured  the commit when it began; a tree that has moved on meanwhile is one with changes
    """
    return {
        "machine": machine(),
        "commit": measured if measured == commit() else f"{measured.removesuffix('+')}+",
        "rows": [asdict(row) for row in bench.rows],
        "notes": bench.notes,
        "quick": bench.quick,
        "took_s": round(took_s, 1),
    }


def table(name: str, rows: Iterable[BenchRow], notes: Iterable[str] = ()) -> Table:
    """The rows for a terminal, the notes below them."""
    made = Table(title=name, title_justify="left", caption="\n".join(notes) or None, caption_justify="left")
    for column, justify in (
        ("", "left"),
        ("value", "right"),
        ("against", "left"),
        ("ratio", "right"),
        ("least", "right"),
    ):
        made.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]  # two of rich's literals
    made.add_column("holds")
    for row in rows:
        cells = _cells(row)
        verdict = "" if row.least is None else ("[green]yes[/green]" if row.holds else "[bold red]no[/bold red]")
        made.add_row(*cells, verdict)
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on, and how busy it was. No name of a host and no path: this is published."""
    from benchmarks.kernels import triad_rate  # numba and the slave's kernels: not for the ranks that import this file

    names = (
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": next(names, platform.machine()),
        "cores": os.cpu_count(),
        **_accelerator(),
        "memory": shown(memory, "B"),
        "triad": shown(triad_rate(pick=min), "B/s"),  # what the machine can do, not how busy it is: that is `load`
        "python": platform.python_version(),
        **_versions(),
        "load": round(os.getloadavg()[0], 2),
    }


def _accelerator() -> dict[str, str]:
    """The device's name, if this process has used torch and there is one."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"accelerator": torch.cuda.get_device_name()}


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # torch: only benchmarks of ranks need it
            continue
    return found


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a living process has used, in user space and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commit(root: Path = ROOT) -> str:
    """The commit of the working tree, with + if it is not clean; "unknown" outside a repository. The record itself does
    not count: each run that is logged would leave a + to the next.
    """
    changed = ("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{path}" for path in RECORDED))
    try:
        said = [
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for words in (("rev-parse", "--short", "HEAD"), changed)
        ]
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository: an installed copy
        return "unknown"
    return said[0] + ("+" if said[1] else "")


def _cells(row: BenchRow) -> tuple[str, str, str, str, str]:
    ratio, least = ("" if x is None else f"{x:.2f}" for x in (row.ratio, row.least))
    return row.name, shown(row.value, row.unit), row.compared, ratio, least
