"""The audit row of a command that writes the ledger itself, while no master runs: its caller is the local user."""

from __future__ import annotations

import getpass
import os
import time

from dips.protocol.operator import cut_text
from dips.protocol.records import OperatorActed


def make_local_row(action: str, arguments: str) -> OperatorActed:
    """Return a row for this process's user and the present time; no certificate proves the user."""
    return OperatorActed(f"local ({_user_name()})", action, cut_text(arguments), "done", False, time.time())


def _user_name() -> str:
    try:
        return cut_text(getpass.getuser())
    except (KeyError, OSError):  # a container's user without a name
        return f"uid {os.getuid()}"
