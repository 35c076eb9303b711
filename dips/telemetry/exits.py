"""The end of every command of Di-PS: prints the error and its advice, and exits with a code that says whose fault it
was.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from dips.distribution import refuse_other_dips
from dips.errors import OF_THE_DISK, DipsError, FailedDisk, treatment_of
from dips.printable import make_lines_printable

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}  # of every command line


def run_command(command_line: Callable[[], object]) -> None:
    """Run a command line; a DipsError becomes its message, its advice and its exit code (errors.TREATMENTS).

    An OSError of a disk that is full, read-only or broken is treated alike, wherever it was raised. One of a file that
    this user may not open is a message, too: daemons keep theirs private.
    """
    end_as_first_process()
    try:
        refuse_other_dips()
        command_line()
    except DipsError as error:
        _end_with(error)
    except OSError as error:
        if error.errno in OF_THE_DISK:
            _end_with(FailedDisk(str(error)))
        if isinstance(error, PermissionError) and error.filename is not None:
            told = f"{error.filename}: {error.strerror}: become the user whose it is, or let this one use it"
            sys.stderr.write(f"error: {make_lines_printable(told)}\n")
            sys.exit(1)  # a daemon that met it is started again: it may pass
        raise


def end_as_first_process() -> None:
    """Let SIGTERM end a command that is the first process of a container: the kernel drops a signal that such a
    process does not handle, and its supervisor would wait to the end of the grace, eleven minutes for a slave.
    """
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))


def _end_with(error: DipsError) -> NoReturn:
    treatment = treatment_of(error)
    advice = f"{treatment.advice}\n" if treatment.advice else ""
    sys.stderr.write(f"error: {make_lines_printable(str(error))}\n{advice}")
    sys.exit(treatment.exit_code)
