"""The command `dips new`: writes the files of a run, with an example model and training script."""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer
import yaml

from dips.config import host_port
from dips.errors import ConfigError
from dips.files import explain_unwritable

RUN, SHARED, CLUSTER = "dips.yaml", "shared.yaml", "cluster.yaml"
EXAMPLE = ("model.py", "train.py")
NAME, LISTEN = "my-run", "127.0.0.1:7800"  # in the templates
TOKENS = 1_500_000  # target of the example: a minute or two on two cores


def new(
    directory: Annotated[Path, typer.Argument(help="The directory, made if missing. Its name becomes the run's.")],
    bare: Annotated[
        bool, typer.Option("--bare", help="Write only the three configuration files, with every key.")
    ] = False,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of the master.")] = LISTEN,
) -> None:
    """Write the files of a new run: configuration, a small model and its training script.

    dips.yaml (master and slaves), shared.yaml (what all must agree on) and cluster.yaml (one training cluster) hold
    every key with its default. model.py and train.py train a small language model on Python source text; replace
    them with yours. Existing files are not overwritten.

    \b
    Example:
      dips new my-run && cd my-run && dips up -- python train.py
      dips new . --bare
    """
    host_port(listen)
    name = re.sub("[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-")[:63].rstrip("-") or NAME
    content = {file: read_template(file).replace(LISTEN, _spell(listen)) for file in (RUN, SHARED, CLUSTER)}
    content[SHARED] = content[SHARED].replace(f"run: {NAME}  ", f"run: {_spell(name)}  ")
    if not bare:
        content |= {file: read_template(file) for file in EXAMPLE}
        content[SHARED] = content[SHARED].replace("tokens: 0  ", f"tokens: {TOKENS}  ")
    _write_all(directory, content)
    if bare:
        print(f"edit `run` in {SHARED} and `cluster` in {CLUSTER}; the other keys show their defaults")
        print(f"next: dips init --config {directory / RUN} --factory MODULE:FUNCTION --seed 1")
    else:
        print(f"next: cd {shlex.quote(str(directory))} && dips up -- python train.py")


def _spell(text: str) -> str:
    """Return `text` as YAML reads it back: in quotes where it is a number, a date (`2026-11-29`) or a list (`[::1]:1`)
    there.
    """
    try:
        return text if yaml.safe_load(text) == text else f'"{text}"'
    except yaml.YAMLError:
        return f'"{text}"'


def read_template(name: str) -> str:
    """Return the text of a template of a new run's file, from the installed package (`dips/templates/`)."""
    return files("dips").joinpath("templates", name).read_text(encoding="utf-8")


def _write_all(directory: Path, content: dict[str, str]) -> None:
    there = [str(directory / name) for name in content if (directory / name).exists()]
    if there:
        raise ConfigError(f"expected none of the files to exist, got {' and '.join(there)}; name another directory")
    with explain_unwritable(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (directory / name).write_text(text, encoding="utf-8")
            print(f"wrote {directory / name}")
