"""The storm: random failures of everything, from a seed that is printed; DIPS_STORM_S seconds of it (60)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from tests.chaos.deployment import Deployment
from tests.chaos.wires import DOWN, UP

SECONDS = float(os.environ.get("DIPS_STORM_S", "60"))
SEED = int(os.environ.get("DIPS_STORM_SEED", str(random.SystemRandom().randrange(1 << 32))))
PAUSE_S = (0.3, 1.5)  # between two failures
DOWN_S = (0.0, 1.5)  # a dead process, a held line, a stopped process: for so long
CALM_S = 120.0  # afterwards, for everybody to be back
DEPLOYMENT = {"clusters": ("east", "west", "north")}


@pytest.mark.timeout(SECONDS + 2 * CALM_S + 60)
def test_the_storm(deployment: Deployment) -> None:
    """At its end every cluster takes part, the ledger adds up, and θ is the reference's."""
    print(f"\nDIPS_STORM_SEED={SEED} DIPS_STORM_S={SECONDS:g}")
    storm = Storm(deployment, random.Random(SEED))
    head, end = deployment.head(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        storm.strike()
        storm.wait(random.Random(storm.strikes).uniform(*PAUSE_S))
    storm.calm()
    print(f"{storm.strikes} strikes: {storm.struck}; {deployment.head().version - head.version} versions meanwhile")
    deployment.progress(2, by=deployment.clusters, within_s=CALM_S)
    deployment.check()


class Storm:
    """Chooses what breaks next, and what is mended when."""

    def __init__(self, deployment: Deployment, rng: random.Random) -> None:
        self._deployment, self._rng, self.strikes, self.struck = deployment, rng, 0, dict[str, int]()
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._deaths: dict[str, float] = {}  # who is down or held, until it is mended

    def strike(self) -> None:
        """Break one thing that is whole."""
        name = self._rng.choice(list(STRIKES))
        self.strikes += 1
        self.struck[name] = self.struck.get(name, 0) + 1
        STRIKES[name](self)

    def wait(self, seconds: float) -> None:
        """Let time pass, and mend what is due."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._mend(time.monotonic())
            time.sleep(0.05)

    def calm(self) -> None:
        self._mend(float("inf"))

    def _mend(self, now: float) -> None:
        due = [item for item in self._later if item[0] <= now]
        self._later = [item for item in self._later if item not in due]
        for _, mend in sorted(due, key=lambda item: item[0]):
            mend()

    def _soon(self, mend: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + self._rng.uniform(*DOWN_S), mend))

    def _whole(self, names: tuple[str, ...]) -> str | None:
        """One of them that lives and is not being mended."""
        alive = [n for n in names if n not in self._deaths and self._deployment.process(n).code is None]
        if not alive:
            return None
        name = self._rng.choice(alive)
        self._deaths[name] = time.monotonic()
        return name

    def _mended(self, name: str, mend: Callable[[], object]) -> None:
        def do() -> None:
            mend()
            del self._deaths[name]

        self._soon(do)

    def kill_slave(self) -> None:
        if name := self._whole(tuple(self._deployment.slaves)):
            self._deployment.process(name).kill()
            self._mended(name, lambda: self._deployment.start_slave(name))

    def kill_master(self) -> None:
        if name := self._whole(("master",)):
            self._deployment.process(name).kill()
            self._mended(name, self._deployment.start_master)

    def kill_agent(self) -> None:
        if name := self._whole(self._deployment.clusters):
            self._deployment.kill_agent(name)
            self._mended(name, lambda: self._deployment.cluster(name))

    def kill_rank(self) -> None:
        name = self._rng.choice(self._deployment.clusters)
        if name not in self._deaths and self._deployment.ranks(name):
            self._deployment.kill_rank(name)

    def kill_job(self) -> None:
        name = self._rng.choice(self._deployment.clusters)
        if name not in self._deaths:
            self._deployment.kill_trainer(name)

    def stop(self) -> None:
        name = self._whole(("master", *self._deployment.slaves, *self._deployment.clusters))
        if name is None:
            return
        pid = self._deployment.process(name).pid
        os.kill(pid, signal.SIGSTOP)
        self._mended(name, lambda: _wake(pid))

    def cut(self) -> None:
        for wire in self._deployment.wires(self._rng.choice((*self._deployment.slaves, *self._deployment.clusters))):
            wire.cut()

    def hold(self) -> None:
        """A partition: of everything of one machine or of one wire, both ways or one way."""
        wires = self._deployment.wires(self._rng.choice((*self._deployment.slaves, *self._deployment.clusters)))
        wires = wires if self._rng.random() < 0.5 else [self._rng.choice(wires)]
        ways = self._rng.choice(((), (UP,), (DOWN,)))
        for wire in wires:
            wire.hold(*ways)
        self._soon(lambda: [wire.heal() for wire in wires])


def _wake(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


STRIKES: dict[str, Callable[[Storm], None]] = {
    "SIGKILL of a slave": Storm.kill_slave,
    "SIGKILL of the master": Storm.kill_master,
    "SIGKILL of an agent": Storm.kill_agent,
    "SIGKILL of a rank": Storm.kill_rank,
    "SIGKILL of a training job": Storm.kill_job,
    "SIGSTOP and SIGCONT": Storm.stop,
    "connections cut": Storm.cut,
    "partition": Storm.hold,
}
