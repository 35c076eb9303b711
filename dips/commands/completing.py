"""Shell completion of names from the run file on the command line, and from its ledger if it is on this machine.

Completion only reads files and contacts no daemon; if a file cannot be read, nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from dips.config import RunFile, load_run
from dips.protocol.tunable import TARGETS, TUNABLE

DEFAULT_FILE = Path("dips.yaml")  # the usual run file
MOST = 50  # names offered at most


def complete_slave(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the slaves of the run file."""
    run_file = _read_run(context)
    return _pick((s.name for s in run_file.slaves) if run_file else (), incomplete)


def complete_cluster(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the clusters in the run file's list and in the ledger."""
    run_file = _read_run(context)
    if run_file is None:
        return []
    return _pick(dict.fromkeys((*(run_file.clusters or ()), *_known_clusters(run_file))), incomplete)


def complete_version(context: typer.Context, incomplete: str) -> list[str]:
    """Complete the newest versions in the ledger."""
    run_file = _read_run(context)
    return _pick(_known_versions(run_file) if run_file else (), incomplete)


def complete_change(incomplete: str) -> list[str]:
    """Complete the keys of `dips set`, each with its `=`."""
    return _pick((f"{key}=" for key in (*TARGETS, *TUNABLE)), incomplete)


def _pick(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)][:MOST]


def _read_run(context: typer.Context) -> RunFile | None:
    named = context.params.get("config")
    try:
        return load_run(Path(named) if named else DEFAULT_FILE)
    except Exception:  # noqa: BLE001 (completion must not print a traceback)
        return None


def _known_clusters(run_file: RunFile) -> list[str]:
    return _read_ledger(run_file, lambda ledger: sorted(ledger.read_tokens()))


def _known_versions(run_file: RunFile) -> list[str]:
    return _read_ledger(
        run_file, lambda ledger: [str(r.version) for r in reversed(ledger.read_history(MOST)) if r.version]
    )


def _read_ledger(run_file: RunFile, read: Callable[[Any], list[str]]) -> list[str]:
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    try:
        with closing(Ledger.open(ledger_path(run_file), readonly=True, verified=False)) as ledger:
            return read(ledger)
    except Exception:  # noqa: BLE001 (as above)
        return []
