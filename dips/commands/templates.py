"""The files that a new run begins with, as they lie in the wheel (`dips/templates/`)."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dips.errors import ConfigError

RUN, SHARED, CLUSTER = "dips.yaml", "shared.yaml", "cluster.yaml"


def read_template(name: str) -> str:
    """The text of one of the three."""
    return files("dips").joinpath("templates", name).read_text(encoding="utf-8")


def write_templates(run_file: Path) -> None:
    """Write the run file and, beside it, the shared section and a cluster file; raise ConfigError if one is there."""
    targets = {RUN: run_file, SHARED: run_file.with_name(SHARED), CLUSTER: run_file.with_name(CLUSTER)}
    there = [str(path) for path in targets.values() if path.exists()]
    if there:
        raise ConfigError(f"--template: {' and '.join(there)} exist already; take another directory")
    for name, path in targets.items():
        try:
            path.write_text(read_template(name), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--template: {path} cannot be written: {error.strerror}") from error
        print(f"wrote {path}")
    print(f"edit `run` in {targets[SHARED]} and `cluster` in {targets[CLUSTER]}; the other keys show their defaults")
    print(f"next: dips init --config {run_file} --factory MODULE:FUNCTION --seed 1")
