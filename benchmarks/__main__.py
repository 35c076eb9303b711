"""Every benchmark, one after another, each in a process of its own; what `make bench` runs.

A benchmark that cannot run (no right to make network namespaces, too little memory) is named with its reason, and
the run fails; those after it are measured all the same. Exit code 1 if a row does not hold or a benchmark did not run.
`python -m benchmarks report` writes what the papers show beside what was measured (report.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.harness import end_in_order, end_process
from benchmarks.record import ROOT, TABLE, append_runs, make_table, shown

NAMES = (
    "kernels", "codecs", "transport", "memory", "persist", "orders", "round", "links", "ablation", "slow_cluster",
    "scale",
)  # fmt: skip
APART = (
    "adapter",
    "recovery",
    "overhead",
    "pace",
    "checkpoint",
    "admission",
    "against_one",
    "attach",
    "calibrate",
    "codec_losses",
    "convergence",
    "lanes",
    "ranks",
    "fragments",
    "endtoend",
    "goodput",
    "peers",
    "ledger_start",
    "mesh",
    "pipeline",
    "planning",
    "scale",
    "site",
)  # only by name: with them `make bench` would take more than its 20 minutes
LIMIT_S = 400.0  # for one of them,
LIMITS_S = {
    "against_one": 2400.0,
    "calibrate": 3600.0,
    "endtoend": 3 * 3600.0,
    "goodput": 3 * 3600.0,
    "peers": 3600.0,
    "convergence": 6 * 3600.0,
    "adapter": 1800.0,
    "mesh": 1200.0,
    "site": 1200.0,
    "pipeline": 2400.0,
    "planning": 3600.0,
}  # but for those that train or search


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["report"]:
        return report.main(words[1:])
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{' '.join(NAMES)}: all by default; {' '.join(APART)}: by name"
    )
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: a look, not a measurement")
    parser.add_argument("--log", action="store_true", help="append the rows to benchmarks/results, and write the table")
    parser.add_argument("--table", action="store_true", help="only write benchmarks/README.md from benchmarks/results")
    args, words = parser.parse_known_args(words)  # --device, --parameters: of the benchmark that is named
    if args.table:
        TABLE.write_text(make_table())
        return 0
    end_in_order()
    console, begun = Console(), time.monotonic()
    names = args.names or [name for name in NAMES if find_spec(f"benchmarks.{name}")]
    results: list[tuple[str, dict[str, Any]]] = []
    unwell: list[str] = []
    for number, name in enumerate(names, 1):
        console.print(f"[bold]({number} of {len(names)}) {name}[/bold]")
        result, reason = run(name, args.quick, words)
        if result is not None:
            results.append((name, result))
        if reason:
            unwell.append(f"{name}: {reason}")
    if args.log and results:
        append_runs(results)
        TABLE.write_text(make_table())
    console.print(f"{len(results)} of {len(names)} benchmarks in {shown(time.monotonic() - begun, 's')}")
    for line in unwell:
        console.print(f"[bold red]{line}[/bold red]")
    return 1 if unwell else 0


def run(name: str, quick: bool, words: Sequence[str] = ()) -> tuple[dict[str, Any] | None, str]:
    """Run one benchmark with its table on this terminal; return its report, if it made one, and what is wrong."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "rows.json"
        command = [
            sys.executable,
            "-m",
            f"benchmarks.{name}",
            "--json",
            str(file),
            *(["--quick"] if quick else []),
            *words,
        ]
        process, limit_s = subprocess.Popen(command, cwd=ROOT), LIMITS_S.get(name, LIMIT_S)
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None, f"not over within {limit_s:g} s"
        finally:
            end_process(process)
        if not file.exists():
            return None, f"ended with {code} and no result"
        result: dict[str, Any] = json.loads(file.read_text())
    if not result["rows"]:
        return None, "; ".join(result["notes"])
    broken = [row["name"] for row in result["rows"] if not row["holds"]]
    return result, f"does not hold: {'; '.join(broken)}" if broken else ""


if __name__ == "__main__":
    sys.exit(main())
