"""The parameter servers know nothing of what is inside a cluster: without dips/inside all else is there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SCRIPT = """
import importlib.util, sys
sys.path.insert(0, sys.argv[1])
import typer
from click.testing import CliRunner
from dips.cli import cli

assert importlib.util.find_spec("dips.inside") is None
import dips.client.rank.outer_loop, dips.master.app, dips.slave.app, dips.client.app

def words(command, path=()):
    for name, each in getattr(command, "commands", {}).items():
        yield from words(each, (*path, name))
    yield path

group = typer.main.get_command(cli)
asked = [path for path in words(group) if not set(path) & {"profile"}]
assert len(asked) > 25, asked
for path in asked:
    assert CliRunner().invoke(group, [*path, "--help"]).exit_code == 0, path
"""


def test_without_it_every_word_is_there(tmp_path: Path) -> None:
    """A copy without the folder: daemons, the library of the ranks and the words of `dips` load."""
    shutil.copytree(ROOT / "dips", tmp_path / "dips", ignore=shutil.ignore_patterns("inside"))  # compiled as it is
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
