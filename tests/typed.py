"""Commands of `dips`, typed by tests in their own process."""

from __future__ import annotations

from typer.testing import CliRunner

from dips.cli import cli
from dips.errors import DipsError


def type_dips(*words: str, code: int = 0) -> str:
    """Run a command; return what it prints. Raises the DipsError with which it ends."""
    done = CliRunner().invoke(cli, words)
    if isinstance(done.exception, DipsError):
        raise done.exception
    assert done.exit_code == code, f"{done.output}\n{done.exception!r}"
    return done.output
