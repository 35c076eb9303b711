"""A simulated operator who seeds the first model (`dips seed`) to empty disks, and whose process dies at times.

The command's loop (commands/seed_lanes.py) is re-implemented; the Coordinator, the slaves and both ends of a stream are
the usual ones. The operator keeps asking until the end: a disk that is lost later lacks the model again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, Protocol

from dips.protocol.effects import Acknowledged, Dropped, Refused, SeedGranted
from dips.protocol.events import SeedAsked
from dips.protocol.records import RunRow
from dips.protocol.seeding import SEED_RANKS
from dips.sim.heap import Chance, Fiber, Gate, Heap, Story, sleep
from dips.sim.network import Network
from dips.sim.streams import DataNetwork, SimTransfer, make_keys
from dips.slave.ports import F32
from dips.wire.frame import Buffer, Range

OPERATOR = "operator"  # name of its machine
CALL_S, ASK_S, IDLE_S = 2.0, 0.5, 8.0
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
        self._gate = Gate()
        self._lives = 0
        self._story: Fiber | None = None
        self._granted: SeedGranted | None = None
        self._moving: SimTransfer | None = None
        self._moved: bool | None = None  # whether the transfer succeeded; None: it is moving

    def start(self) -> None:
        """Start a new process, without the state of the former one."""
        self._lives += 1
        self._granted = self._moving = self._moved = None
        self._story = Fiber(self._bring_model(f"seeder-{self._lives}"))

    def _bring_model(self, nonce: str) -> Story:
        world = self._world
        while True:
            given_up = self._granted.push.seq if self._granted is not None and self._moved is False else 0
            asked = SeedAsked(0, nonce, self._digests, given_up, make_keys(nonce, SEED_RANKS))
            answer: Any = yield partial(world.network.call_host, OPERATOR, "master", asked, CALL_S)
            if isinstance(answer, SeedGranted):
                self._begin_transfer(answer, asked.keys)
            elif isinstance(answer, Dropped):
                world.monitor.rare_event_occurred("seed_broken")
                self._end_transfer()
            elif isinstance(answer, Acknowledged) and self._lives and self._granted is not None:
                world.monitor.rare_event_occurred("seeded")
            done = isinstance(answer, Acknowledged | Refused)
            yield sleep(world.heap, IDLE_S if done else ASK_S, "the operator asks again")

    def _begin_transfer(self, granted: SeedGranted, keys: tuple[str, ...]) -> None:
        if self._granted is not None and self._granted.push == granted.push:
            return
        self._end_transfer()
        self._granted = granted
        ended: Callable[[bool], None] = partial(self._on_ended, granted)
        self._moving = self._world.data.begin_push(granted.push, granted.grant, self._spell, keys, self._gate, 1, ended)
        if self._rng.random() < DEATHS:
            self._world.heap.call_later(0.5 * self._rng.random(), "the operator dies", self._die)

    def _die(self) -> None:
        if self._story is not None:
            self._story.kill()
        self._end_transfer()
        self._world.heap.call_later(DOWN_S * self._rng.random(), "the operator comes back", self.start)

    def _end_transfer(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        self._granted = self._moving = self._moved = None

    def _on_ended(self, granted: SeedGranted, moved: bool) -> None:
        if self._granted is granted:
            self._moved = moved

    def _spell(self, rank: int, chunk: Range) -> Buffer:
        begin = self._world.data.layout.fields[chunk.layer, chunk.param].start + chunk.offset
        return self._world.genesis[chunk.layer][begin : begin + chunk.length].tobytes()
