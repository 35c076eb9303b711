"""What an agent leaves behind in its directory for the next one: its life, and what that consumed.

Beats tell it to the master, who keeps it in his memory; if both die, the next agent here still knows it, and tells it
as lost. Written aside and renamed, before each beat and before a push can be settled (deeds.KEPT_AT). Not fsynced: it
is to outlive the process, not the machine.
"""

from __future__ import annotations

import json
from pathlib import Path

from dips.client.agent.account import NO_INCARNATION, PastIncarnation
from dips.telemetry.logs import Log

FILE = "life.json"


class IncarnationFile:
    """The file of one directory; whoever holds `agent.pid` owns it."""

    def __init__(self, directory: Path, run: str, cluster: str, log: Log) -> None:
        self._path, self._whose, self._log = directory / FILE, {"run": run, "cluster": cluster}, log
        self._kept: PastIncarnation | None = None
        self._fails = False

    def former(self) -> PastIncarnation:
        """What the last agent here left; NO_LIFE if there was none, or if it was another run's or cluster's."""
        try:
            found = json.loads(self._path.read_text())
            life = PastIncarnation(int(found["inc"]), int(found["tokens_consumed"]))
            return life if found.items() >= self._whose.items() else NO_INCARNATION
        except FileNotFoundError:
            return NO_INCARNATION
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            done = "tokens that the last agent here did not tell stay untold"
            self._log.warning("life_not_read", path=str(self._path), error=str(error), done=done)
            return NO_INCARNATION

    def keep(self, life: PastIncarnation) -> None:
        """Leave this behind; a disk that is full costs no training."""
        if life == self._kept:
            return
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({**self._whose, "inc": life.inc, "tokens_consumed": life.consumed}))
            aside.replace(self._path)
            self._kept, self._fails = life, False
        except OSError as error:
            if not self._fails:
                self._log.warning("life_not_written", path=str(self._path), error=str(error))
            self._fails = True
