"""The file that an agent leaves in its directory for the next one: its incarnation and the tokens that it consumed.

Heartbeats report both to the master, which keeps them in memory; if both processes die, the next agent here still knows
the tokens and reports them as lost. The file is written aside and renamed, before each heartbeat and before a push can
be settled (actions.SAVED_AT). It is not fsynced: it must survive the process, not the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.telemetry.logs import Log

FILE = "incarnation.json"


class IncarnationFile:
    """The incarnation file of one directory; the holder of `agent.pid` owns it."""

    def __init__(self, directory: Path, run: str, cluster: str, log: Log) -> None:
        self._path, self._whose, self._log = directory / FILE, {"run": run, "cluster": cluster}, log
        self._saved: PastIncarnation | None = None
        self._fails = False

    def read_former(self) -> PastIncarnation:
        """Return what the last agent here saved; NO_INCARNATION if there is none, or if it is another run's or
        cluster's.
        """
        try:
            found = json.loads(self._path.read_text())
            past = PastIncarnation(int(found["inc"]), int(found["tokens_consumed"]))
            return past if found.items() >= self._whose.items() else NO_INCARNATION
        except FileNotFoundError:
            return NO_INCARNATION
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            done = "tokens that the last agent here did not report stay unreported"
            self._log.warning("incarnation_not_read", path=str(self._path), error=str(error), done=done)
            return NO_INCARNATION

    def save_incarnation(self, past: PastIncarnation) -> None:
        """Save an incarnation; a failure (a full disk) is logged and does not stop training."""
        if past == self._saved:
            return
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({**self._whose, "inc": past.inc, "tokens_consumed": past.consumed}))
            aside.replace(self._path)
            self._saved, self._fails = past, False
        except OSError as error:
            if not self._fails:
                self._log.warning("incarnation_not_written", path=str(self._path), error=str(error))
            self._fails = True
