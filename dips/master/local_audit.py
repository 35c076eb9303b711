"""The audit's row of a command that writes the ledger itself, while no master runs: who has the files did it."""

from __future__ import annotations

import getpass
import os
import time

from dips.protocol.bounded_text import cut_text
from dips.protocol.records import OperatorActed


def make_local_row(action: str, arguments: str) -> OperatorActed:
    """Done by the user of this process, now; no certificate proves it."""
    return OperatorActed(f"local ({_user_name()})", action, cut_text(arguments), "done", False, time.time())


def _user_name() -> str:
    try:
        return cut_text(getpass.getuser())
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"
