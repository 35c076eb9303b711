"""How every command of Di-PS ends: what went wrong, what to do, and an exit code that says whose fault it was."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dips.distribution import refuse_other_dips
from dips.errors import DipsError, treatment_of


def run_command(command_line: Callable[[], object]) -> None:
    """Run a command line; a DipsError becomes its message, its advice and its exit code (errors.TREATMENTS)."""
    try:
        refuse_other_dips()
        command_line()
    except DipsError as error:
        how = treatment_of(error)
        sys.stderr.write(f"error: {error}\n{how.advice}\n")
        sys.exit(how.exit_code)
