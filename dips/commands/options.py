"""Options that several words share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.config import load_run
from dips.errors import ConfigError

CONFIG = Annotated[Path, typer.Option("--config", "-c", help="The run file: one run, its master and its slaves.")]
WHOSE = Annotated[Path | None, typer.Option("--config", "-c", help="The run file; names the master.")]
MASTER = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="The master, instead of --config.")]


def address_of(config: Path | None, master: str | None) -> str:
    """Where the master answers: as the run file says, or as was said; raise ConfigError unless one of them is given."""
    if (config is None) == (master is None):
        raise ConfigError("whom to ask: give --config FILE or --master HOST:PORT, one of them")
    return master or load_run(config).master.listen  # type: ignore[arg-type]
