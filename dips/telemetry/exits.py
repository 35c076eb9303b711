"""How every command of Di-PS ends: what went wrong, what to do, and an exit code that says whose fault it was."""

from __future__ import annotations

import sys
from collections.abc import Callable

from dips.distribution import refuse_other_dips
from dips.errors import DipsError, advice_for, treatment_of
from dips.printable import make_lines_printable

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}  # of every command line


def run_command(command_line: Callable[[], object]) -> None:
    """Run a command line; a DipsError becomes its message, its advice and its exit code (errors.TREATMENTS)."""
    try:
        refuse_other_dips()
        command_line()
    except DipsError as error:
        advice = advice_for(error)
        sys.stderr.write(f"error: {make_lines_printable(str(error))}\n" + (f"{advice}\n" if advice else ""))
        sys.exit(treatment_of(error).exit_code)
