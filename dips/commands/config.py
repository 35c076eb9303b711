"""The command `dips config`: prints configuration files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dips.config import load_cluster, load_run
from dips.config.reading import is_cluster_file

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
