"""Run files of tests that start no daemon, or one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml


def write_run_file(directory: Path, slaves: Sequence[str] = ("s0", "s1"), **master: Any) -> Path:
    """Write dips.yaml of the run r in plain text, with a directory for the master (m) and for each slave."""
    own = {"master": "127.0.0.1:1", "initial_model": "m/initial"}
    content = {
        "shared": {"run": "r"}, "master": {"directory": "m", **master},
        "slaves": [{"name": name, "directory": name, **own} for name in slaves], "tls": False,
    }  # fmt: skip
    (path := directory / "dips.yaml").write_text(yaml.safe_dump(content))
    return path
