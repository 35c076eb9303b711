"""`dips export`: take a version out as one checkpoint."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dips.commands.options import CONFIG
from dips.config import load_run
from dips.errors import ConfigError
from dips.ids import GENESIS, VersionId


def export(
    config: CONFIG,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    version: Annotated[str | None, typer.Option(metavar="vN@rM", help="Which version; default the head.")] = None,
) -> None:
    """Write one version as a safetensors file.

    Parameters have the model's own names. Reads the slaves' snapshots, so it works while the run goes on and after it
    has ended; the directories of all slaves must be readable from here.

    \b
    Example:
      dips export --config dips.yaml --output model.safetensors
      dips export --config dips.yaml --output early.safetensors --version v12@r17
    """
    from dips.master.genesis import INITIAL_MODEL
    from dips.slave.export import export_snapshot as write

    run_file = load_run(config)
    wanted = _parse_version(version) if version else _committed_head(config)
    if wanted == GENESIS:  # no slave writes it down
        shutil.copyfile(run_file.master.directory / INITIAL_MODEL, output)
        written = GENESIS
    else:
        written = write([s.directory for s in run_file.slaves], wanted, output)
    print(f"wrote {written} to {output} ({output.stat().st_size / 1e6:.1f} MB)")


def _parse_version(version: str) -> VersionId:
    try:
        return VersionId.parse(version)
    except ValueError as error:
        raise ConfigError(f"--version: {error}") from error


def _committed_head(config: Path) -> VersionId | None:
    """The committed head, or None where the ledger is not at hand: then the newest complete snapshot is taken."""
    from dips.master.genesis import ledger_path
    from dips.master.ledger import Ledger

    path = ledger_path(load_run(config))
    if not path.exists():
        print(f"note: no ledger at {path}: taking the newest version that all slaves have", file=sys.stderr)
        return None
    with closing(Ledger.open(path, readonly=True)) as ledger:
        return ledger.read_state().versions[-1].version
