"""Sends a model to the slaves over their lanes, as a push that the master grants to an operator: the first one (`dips
seed`), or a saved one (`dips recover`).

The master is asked repeatedly: its answer says what to do next, so that a restart of any process costs only time.
Layers that a slave has on its disk are not sent again.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from dips.client.rank.transfer import TransferIdentity, TransferRate, push_pieces
from dips.commands import operator
from dips.errors import Busy, ConfigError, DipsError, UnavailableMaster, UnavailableSlave
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Dropped, Pending, Refused, Result, SeedGranted
from dips.protocol.events import RecoverAsked, SeedAsked
from dips.protocol.manifest import Manifest
from dips.transport import seal
from dips.transport.endpoints import Endpoint
from dips.wire.chunks import F32, Piece

ASK_S = 1.0  # pause between two questions; a lease is ten seconds by default
STALL_S = 30.0  # a transfer to a slave that asks for nothing for this long is ended and tried again
MOST_DROPS = 10  # dropped transfers before giving up for good

Tensors = Mapping[str, F32]


@dataclass
class SeedWatch:
    """Callbacks for the display: progress, and the reason for waiting."""

    on_rate: Callable[[TransferRate], None]
    on_wait: Callable[[str], None]


class SeedLanes(Protocol):
    """How a process that brings a model reaches the run."""

    seeder: str  # names this process, and no other
    keys: tuple[str, ...]  # the public ones of its streams

    async def ask_master(self, question: SeedAsked | RecoverAsked) -> Result:
        """Return the master's answer. Raises UnavailableMaster."""

    async def send_layers(self, granted: SeedGranted, on_rate: Callable[[TransferRate], None]) -> None:
        """Send the granted layers, until cancelled; what is under way has ended then. Raises DipsError."""


class ModelLanes:
    """SeedLanes of a model in this process."""

    def __init__(self, master: Endpoint, run: str, manifest: Manifest, tensors: Tensors) -> None:
        self._master, self._run = master, run
        self._pieces = list_seed_pieces(manifest, tensors)
        self._keys = seal.new_keys()
        self.keys: tuple[str, ...] = (self._keys.public,)
        self.seeder = uuid.uuid4().hex

    async def ask_master(self, question: SeedAsked | RecoverAsked) -> Result:
        result: Result = await operator.ask_master(self._master, question)
        return result

    async def send_layers(self, granted: SeedGranted, on_rate: Callable[[TransferRate], None]) -> None:
        grant, push, cancel = granted.grant, granted.push, threading.Event()
        identity = TransferIdentity(self._run, push.cluster, push.inc, push.seq, 0, self._keys)
        layers = {layer for slave in grant.slaves for layer in slave.layers}
        pieces = [piece for piece in self._pieces if piece.layer in layers]
        send = partial(push_pieces, stall_s=STALL_S, cancel=cancel, progress=on_rate)
        sent = asyncio.ensure_future(asyncio.to_thread(send, grant, identity, pieces))
        try:
            await asyncio.shield(sent)
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.gather(sent, return_exceptions=True)
            raise


@dataclass(frozen=True, slots=True)
class _Moving:
    """One transfer; its task returns what made it fail, None if all bytes have moved."""

    granted: SeedGranted
    task: asyncio.Task[DipsError | None]

    @property
    def has_moved(self) -> bool:
        return self.task.done() and self.task.result() is None

    @property
    def error(self) -> DipsError | None:
        return self.task.result() if self.task.done() else None

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


class SeedTransfer:
    """One attempt to send a model to the slaves of a run."""

    def __init__(
        self, lanes: SeedLanes, watch: SeedWatch, wait_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare the transfer; `wait_s` is the longest time without progress."""
        self._lanes, self._watch, self._wait_s, self._clock = lanes, watch, wait_s, clock
        self._moving: _Moving | None = None
        self.version: VersionId | None = None  # that the last grant was for; v0@r0 for the first model
        self._drops = 0
        self._progress_at = clock()

    async def bring_model(self, question: SeedAsked | RecoverAsked) -> None:
        """Send the model; return when every slave has it on its disk, and a saved one is the head.

        question  with the model's digests; what names this process in it is filled in here
        Errors    ConfigError: the run has another first model, or has begun; nothing is lost; UnavailableMaster,
                  UnavailableSlave: nothing moved within the time to wait, or the slaves dropped the transfer repeatedly
        """
        try:
            while True:
                result = await self._ask_master(question)
                # a run that has begun has this model, since with another one the answer would have been an error
                has_moved = self._moving is not None and self._moving.has_moved
                begun = isinstance(question, SeedAsked) and isinstance(result, Refused) and has_moved
                if begun or isinstance(result, Acknowledged):
                    return
                await self._follow_result(result)
                await asyncio.sleep(ASK_S)
        finally:
            await self._end_transfer()

    async def _ask_master(self, question: SeedAsked | RecoverAsked) -> Result:
        """Ask the master for the next step; a master that is away is asked again, and has forgotten the transfer when
        it returns.
        """
        failed = self._moving if self._moving is not None and self._moving.error is not None else None
        given_up = failed.granted.push.seq if failed is not None else 0
        try:
            question = replace(question, seeder=self._lanes.seeder, given_up=given_up, keys=self._lanes.keys)
            if isinstance(question, RecoverAsked):
                question = replace(question, version=self.version)
            result = await self._lanes.ask_master(question)
        except (UnavailableMaster, Busy) as error:
            self._say_waits(str(error), error)
            return Pending(str(error))
        if failed is not None and not isinstance(result, Acknowledged):
            self._count_drop(str(failed.error))
            self._moving = None
        return result

    async def _follow_result(self, result: Result) -> None:
        match result:
            case SeedGranted():
                await self._begin_transfer(result)
            case Pending(reason):
                self._say_waits(reason, UnavailableSlave(f"nothing has moved for {self._wait_s:g} s: {reason}"))
            case Dropped(reason):
                self._count_drop(reason)
                await self._end_transfer()
            case Refused():
                raise ConfigError(result.reason)
            case _:
                raise UnavailableMaster(f"the master answered {type(result).__name__} to the offer of a model")

    async def _begin_transfer(self, granted: SeedGranted) -> None:
        """Start the granted transfer, unless it is moving already."""
        if self._moving is not None and self._moving.granted.push == granted.push:
            return
        await self._end_transfer()
        self._moving, self.version = _Moving(granted, asyncio.create_task(self._send(granted))), granted.grant.version

    async def _end_transfer(self) -> None:
        """Cancel the transfer that is under way, if there is one, and wait for its end."""
        if self._moving is not None:
            await self._moving.end()
        self._moving = None

    async def _send(self, granted: SeedGranted) -> DipsError | None:
        """Send the granted layers; return what made it fail: the master is asked again."""
        try:
            await self._lanes.send_layers(granted, self._on_rate)
        except DipsError as error:
            return error
        return None

    def _on_rate(self, rate: TransferRate) -> None:
        if rate.bytes_per_s or rate.nbytes >= rate.total:
            self._progress_at = self._clock()
        self._watch.on_rate(rate)

    def _say_waits(self, reason: str, error: DipsError) -> None:
        self._watch.on_wait(reason)
        if self._clock() - self._progress_at > self._wait_s:
            raise error

    def _count_drop(self, reason: str) -> None:
        self._drops += 1
        self._watch.on_wait(f"begins anew: {reason}")
        if self._drops >= MOST_DROPS:
            raise UnavailableSlave(f"given up after {MOST_DROPS} attempts, the last one: {reason}")


def list_seed_pieces(manifest: Manifest, tensors: Tensors) -> list[Piece]:
    """Return every parameter of a model as one piece."""
    flats = (
        (l, p, np.ascontiguousarray(tensors[parameter.name], dtype=np.float32).reshape(-1))
        for l, layer in enumerate(manifest.layers)
        for p, parameter in enumerate(layer.parameters)
    )
    return [Piece(l, p, 0, flat.size, flat) for l, p, flat in flats if flat.size]


async def await_master(master: Endpoint, watch: SeedWatch, wait_s: float) -> dict[str, Any]:
    """Return the master's status as soon as it answers. Raises UnavailableMaster after `wait_s`."""
    from dips.commands.status import ask_status

    until = time.monotonic() + wait_s
    while True:
        try:
            return await ask_status(master)
        except (UnavailableMaster, Busy) as error:
            if time.monotonic() >= until:
                raise
            watch.on_wait(str(error))
        await asyncio.sleep(ASK_S)
