"""The command `dips check`: checks run files and cluster files, and the peers of a cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.config_checks import check_files, read_files
from dips.commands.options import AS_JSON
from dips.config import ClusterFile, load_cluster, load_run
from dips.config.reading import is_cluster_file
from dips.errors import ConfigError, Unavailable, treatment_of
from dips.printable import FAIL, NOTE, CheckFinding

MIB = 1 << 20


def check(
    files: Annotated[
        list[Path],
        typer.Option("--config", "-c", metavar="FILE", help="A run file or a cluster file. Repeatable."),
    ],
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--for", metavar="NAME.ROLE", help="Require the files of this process, since it will run here. Repeatable."
        ),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Compare the model that this function makes with the run's."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Compare this safetensors file's names and shapes with the run's.")
    ] = None,
    most_mib: Annotated[
        int, typer.Option(min=0, help="Transfer at most this many MiB to measure a rate; 0: do not measure.")
    ] = 64,
    seconds: Annotated[float, typer.Option(min=0.1, help="End a measured transfer after this many seconds.")] = 2.0,
    as_json: AS_JSON = False,
) -> None:
    """Check files before daemons start, and a cluster's peers before its accelerators are held.

    A run file is checked without asking any process: keys and values; addresses and directories used twice;
    certificates, their keys, names and dates (those on this machine and those named by --for); the ledger and the
    memory of the slaves whose directories are on this machine. A cluster file that is given with it must agree with it.

    A cluster file by itself is compared with the run that its master serves: names, shared options, every lane of every
    slave, the rate to each slave in both directions, and the model (--factory or --model). On this machine it checks
    the directory, the agent's address, and the program of `before_start`. That does not join the run or change
    anything; a measured transfer moves at most --most-mib each way, on one lane of one slave after another.

    Exit codes: 0 nothing is wrong, though there may be notes; 69 a peer does not answer; 78 something is configured
    wrongly.

    \b
    Example:
      dips check --config dips.yaml --config cluster.yaml
      dips check --config dips.yaml --for slave-0.slave
      dips check --config cluster.yaml --factory mymodel:build
    """
    if factory and model:
        raise ConfigError("which model: give --factory or --model, not both")
    read = read_files(files)
    rows = check_files(read, tuple(labels or ()))
    if read.only_clusters:
        for path, file in read.clusters:
            rows += [replace(row, what=f"{path}: {row.what}") for row in _ask(file, factory, model, most_mib, seconds)]
    elif factory or model:
        raise ConfigError("--factory and --model are compared with a master's run: give cluster files only")
    wrong = [row for row in rows if row.verdict == FAIL]
    if as_json:
        print(json.dumps({"ok": not wrong, "rows": [asdict(row) for row in rows]}))
    else:
        for row in rows:
            print(row)
        notes = sum(row.verdict == NOTE for row in rows)
        print(f"{'something' if wrong else 'nothing'} is wrong; {notes} note{'' if notes == 1 else 's'}")
    if wrong:
        raise typer.Exit(treatment_of(Unavailable() if all(row.silent for row in wrong) else ConfigError()).exit_code)


def _ask(
    file: ClusterFile, factory: str | None, model: Path | None, most_mib: int, seconds: float
) -> list[CheckFinding]:
    from dips.client.preflight.peers import ask_peers, manifest_of_factory, manifest_of_file

    grouping, ours = file.shared.grouping, None
    if factory:
        ours = partial(manifest_of_factory, factory, grouping)
    elif model:
        ours = partial(manifest_of_file, model, grouping)
    return ask_peers(file, ours, most_mib * MIB, seconds)


# ---- config ----------------------------------------------------------------------------------------------------------

words = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Print configuration files.")


@words.command("show")
def show_command(file: Annotated[Path, typer.Argument(help="A run file or a cluster file.")]) -> None:
    """Print a file as JSON, as a daemon reads it: every key with its value, including defaults, paths made absolute.

    \b
    Example:
      dips config show dips.yaml | jq .master.timing
    """
    load = load_cluster if is_cluster_file(file) else load_run
    print(json.dumps(load(file).model_dump(mode="json"), indent=2))
