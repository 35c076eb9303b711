"""A simulated operator who seeds the first model (`dips seed`) to empty disks, and whose process dies at times.

The command's own loop (commands/seed_lanes.py) runs on a loop of the world's time; replaced are its connection to the
master and its streams. The operator types it again until the end: a disk that is lost later lacks the model again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Protocol

from dips.client.rank.transfer import TransferRate
from dips.commands.seed_lanes import SeedTransfer, SeedWatch
from dips.errors import ConfigError, UnavailableMaster, UnavailableSlave
from dips.protocol.effects import Dropped, Result, SeedGranted
from dips.protocol.events import RecoverAsked, SeedAsked
from dips.protocol.records import RunRow
from dips.protocol.seeding import SEED_RANKS
from dips.sim.heap import Chance, Gate, Heap
from dips.sim.loop import SimLoop
from dips.sim.network import Network
from dips.sim.streams import DataNetwork, make_keys
from dips.slave.ports import F32
from dips.tasks import start_task
from dips.wire.frame import Buffer, Range

OPERATOR = "operator"  # name of its machine
CALL_S, IDLE_S = 2.0, 8.0
WAIT_S = 60.0  # without progress; then the command fails, and is typed again
DEATHS = 0.3  # share of transfers during which it dies
DOWN_S = 3.0


class SeederObserver:
    """The hook that a seeder calls; does nothing by default."""

    def rare_event_occurred(self, what: str) -> None:
        """Called for a rare event that has no hook of its own; coverage counts it by this name."""


class SeederWorld(Protocol):
    """The parts of the world that a seeder needs."""

    heap: Heap
    chance: Chance
    network: Network
    data: DataNetwork
    genesis: dict[int, F32]

    @property
    def monitor(self) -> SeederObserver: ...


class SimSeeder:
    """One operator, whose processes die and are restarted."""

    def __init__(self, world: SeederWorld, row: RunRow) -> None:
        self._world, self._digests = world, row.genesis
        self._rng: Random = world.chance.generator_for("seeder")
        self._lives = 0
        self._loop: SimLoop | None = None

    def start(self) -> None:
        """Start a new process, without the state of the former one."""
        self._lives += 1
        self._process = f"seeder-{self._lives}"
        rng = self._world.chance.generator_for(f"loop/{self._process}")
        loop = self._loop = SimLoop(self._world.heap, rng, OPERATOR)
        loop.deliver(lambda: start_task(self._seed(loop), loop.fail))

    async def _seed(self, loop: SimLoop) -> None:
        watch = SeedWatch(lambda rate: None, lambda reason: None)
        typed = 0
        while True:
            typed += 1
            lanes = SimSeedLanes(self._world, loop, f"{self._process}.{typed}", self._draw_death)
            try:
                await SeedTransfer(lanes, watch, WAIT_S, loop.time).bring_model(SeedAsked(0, "", self._digests))
                self._world.monitor.rare_event_occurred("seeded")
            except (ConfigError, UnavailableMaster, UnavailableSlave):
                pass  # the run has begun, or nothing moved
            await asyncio.sleep(IDLE_S)

    def close(self) -> None:
        """End the process, and its loop with it."""
        if self._loop is not None:
            self._loop.kill()

    def _draw_death(self) -> None:
        if self._rng.random() < DEATHS:
            self._world.heap.call_later(0.5 * self._rng.random(), "the operator dies", partial(self._die, self._lives))

    def _die(self, life: int) -> None:
        if life == self._lives and self._loop is not None and not self._loop.dead:
            self._loop.kill()
            self._world.heap.call_later(DOWN_S * self._rng.random(), "the operator comes back", self.start)


class SimSeedLanes:
    """SeedLanes (commands/seed_lanes.py) of the simulated network."""

    def __init__(self, world: SeederWorld, loop: SimLoop, seeder: str, begins: Callable[[], None]) -> None:
        """Called when a transfer begins: `begins`."""
        self._world, self._loop, self._begins = world, loop, begins
        self.seeder, self.keys = seeder, make_keys(seeder, SEED_RANKS)

    async def ask_master(self, question: SeedAsked | RecoverAsked) -> Result:
        answer: Result = await self._world.network.ask_master(self._loop, OPERATOR, question, CALL_S)
        if isinstance(answer, Dropped):
            self._world.monitor.rare_event_occurred("seed_broken")
        return answer

    async def send_layers(self, granted: SeedGranted, on_rate: Callable[[TransferRate], None]) -> None:
        ended = self._loop.create_future()

        def end(moved: bool) -> None:
            if not ended.done():
                ended.set_result(moved)

        moving = self._world.data.begin_push(
            granted.push, granted.grant, self._spell, self.keys, Gate(), 1, partial(self._loop.deliver, end)
        )
        self._begins()
        try:
            if not await ended:
                raise UnavailableSlave("a stream has broken")
            on_rate(TransferRate(1, 1, 0.0))
        finally:
            moving.cancel()

    def _spell(self, rank: int, chunk: Range) -> Buffer:
        begin = self._world.data.layout.fields[chunk.layer, chunk.param].start + chunk.offset
        return self._world.genesis[chunk.layer][begin : begin + chunk.length].tobytes()
