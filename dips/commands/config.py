"""The command `dips config`: checks and prints configuration files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.config_checks import FAIL, NOTE, check_files
from dips.commands.options import AS_JSON
from dips.config import load_cluster, load_run
from dips.config.reading import is_cluster_file
from dips.printable import format_finding

EXIT_REFUSED = 78

words = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Check configuration files before starting daemons."
)
FILES = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Run files and cluster files to check together.")]


@words.command("check")
def check_command(
    files: FILES,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--for", metavar="NAME.ROLE", help="Require the files of this process, since it will run here. Repeatable."
        ),
    ] = None,
    as_json: AS_JSON = False,
) -> None:
    """Find everything that the daemons would refuse, and contradictions between files, without starting a daemon.

    Checks keys and values; addresses and directories used twice; certificates, their keys, names and dates (those on
    this machine and those named by --for); the ledger and the memory of the slaves whose directories are on this
    machine; and whether a cluster file agrees with a run file given with it.

    Exit codes: 0 nothing would be refused, though there may be notes; 78 something would be.

    \b
    Example:
      dips config check dips.yaml cluster.yaml
      dips config check dips.yaml --for slave-0.slave
    """
    rows = check_files(files, tuple(labels or ()))
    refused = any(row.verdict == FAIL for row in rows)
    if as_json:
        print(json.dumps({"ok": not refused, "rows": [asdict(row) for row in rows]}))
    else:
        for row in rows:
            print(format_finding(row.verdict, row.what, row.seen, row.remedy))
        notes = sum(row.verdict == NOTE for row in rows)
        said = f"{notes} note" if notes == 1 else f"{notes} notes"
        print(f"{'something' if refused else 'nothing'} would be refused; {said}")
    raise typer.Exit(EXIT_REFUSED if refused else 0)


@words.command("show")
def show_command(file: Annotated[Path, typer.Argument(help="A run file or a cluster file.")]) -> None:
    """Print a file as JSON, as a daemon reads it: every key with its value, including defaults, paths made absolute.

    \b
    Example:
      dips config show dips.yaml | jq .master.timing
    """
    load = load_cluster if is_cluster_file(file) else load_run
    print(json.dumps(load(file).model_dump(mode="json"), indent=2))
