"""The machine on which simulated masters run, with the ledger's file, which survives the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dips.errors import Denied
from dips.protocol.effects import Failed
from dips.protocol.records import Record, RunRow
from dips.sim.ledger_disk import LedgerDisk
from dips.sim.master import Answer, MasterProcess, MasterWorld


class MasterMachine:
    """The machine on which masters run."""

    def __init__(self, world: MasterWorld, row: RunRow) -> None:
        self.world = world
        self.rng = world.chance.generator_for("master")
        self.disk = LedgerDisk(row)
        self.process: MasterProcess | None = None
        self._raised: list[Record] = []  # records raised by a restore, reported when a master starts
        self.zombies: list[MasterProcess] = []  # processes that are stopped and taken for dead; each has a successor
        self.revoked: dict[str, str] = {}  # senders whose calls are refused (transport/gate.py), with the reason
        world.network.attach_host("master", self)

    def start(self) -> None:
        if self.process is None:
            for record in self._raised:
                self.world.monitor.record_written(record)
            self._raised = []
            self.process = MasterProcess(self)

    def crash(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill_process()

    def lose_disk(self) -> None:
        """Lose the machine with all its processes; another one starts from the ledger's mirror."""
        self._end_all()
        self._raised = self.disk.lose_disk()

    def restore_beside_wal(self, directory: Path) -> None:
        """Move the ledger's file away after a crash, but not its WAL; restore it on files in `directory`."""
        self._end_all()
        self._raised = self.disk.restore_beside_wal(directory)

    def _end_all(self) -> None:
        self.crash()
        for zombie in self.zombies:
            zombie.kill_process()
        self.zombies.clear()

    def abandon_process(self) -> MasterProcess | None:
        """Stop the process and take it for dead; another will be started on the same ledger (another host, a mount
        without locks).
        """
        process, self.process = self.process, None
        if process is not None:
            process.pause_process()
            self.zombies.append(process)
        return process

    def on_message(self, sender: str, message: Any, answer: Answer) -> None:
        if self.process is None:
            return
        if reason := self.revoked.get(sender):
            answer(Failed(Denied, reason))
        else:
            self.process.on_message(message, answer)
