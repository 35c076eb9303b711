"""Brings the first model to the slaves over their lanes, as a push that the master grants to an operator.

The master is asked again and again: its answer says what is to be done next, so that a restart of any party costs time
and nothing else. What a slave has on its disk is not brought again.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dips.client.rank.transfer import push_pieces
from dips.client.rank.transfer_types import TransferIdentity, TransferRate
from dips.commands import operator
from dips.errors import ConfigError, DipsError, UnavailableMaster, UnavailableSlave
from dips.protocol.effects import Acknowledged, Dropped, Grant, Pending, Refused, Result, SeedGranted
from dips.protocol.events import SeedAsked
from dips.protocol.manifest import Manifest
from dips.transport import curve
from dips.transport.endpoints import Endpoint
from dips.transport.shares import F32, Piece

ASK_S = 1.0  # between two questions; a lease is ten seconds by default
STALL_S = 30.0  # a slave that asks for nothing for so long is given up, and asked again
MOST_DROPS = 10  # of the transfer, before it is given up for good

Tensors = Mapping[str, F32]


@dataclass
class SeedWatch:
    """What a person is told: how far it is, and what it waits for."""

    on_rate: Callable[[TransferRate], None]
    on_wait: Callable[[str], None]


@dataclass
class _Moving:
    """One transfer, in a thread."""

    granted: SeedGranted
    cancel: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task[None] | None = None
    error: DipsError | None = None

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    async def end(self) -> None:
        self.cancel.set()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)


class SeedTransfer:
    """One process's attempt to bring one model to the slaves of one run."""

    def __init__(
        self, master: Endpoint, run: str, manifest: Manifest, tensors: Tensors, watch: SeedWatch, wait_s: float
    ) -> None:
        """`wait_s`: without any sign of progress for so long, give up."""
        self._master, self._run, self._watch, self._wait_s = master, run, watch, wait_s
        self._pieces = list_seed_pieces(manifest, tensors)
        self._nonce, self._keys = uuid.uuid4().hex, curve.new_keys()
        self._moving: _Moving | None = None
        self._drops = 0
        self._progress_at = time.monotonic()

    async def bring_model(self, genesis: tuple[str, ...]) -> None:
        """Return when every slave has it on its disk.

        Errors  ConfigError: this run's first model is another, or it has begun; UnavailableMaster, UnavailableSlave:
                no progress within the time to wait, or the slaves dropped it again and again
        """
        try:
            while True:
                result = await self._ask_master(genesis)
                if isinstance(result, Acknowledged) or (isinstance(result, Refused) and self._has_moved()):
                    return  # a run that has begun has its first model, which is this one: another was Failed
                await self._follow_result(result)
                await asyncio.sleep(ASK_S)
        finally:
            if self._moving is not None:
                await self._moving.end()

    async def _ask_master(self, genesis: tuple[str, ...]) -> Result:
        """A master that is away is asked again; one that is back has forgotten what moved."""
        broken = self._moving is not None and self._moving.over and self._moving.error is not None
        given_up = self._moving.granted.push.seq if broken and self._moving is not None else 0
        try:
            result: Result = await operator.ask_master(
                self._master, "Seed", SeedAsked(0, self._nonce, genesis, given_up, (self._keys.public,))
            )
        except UnavailableMaster as error:
            self._say_waits(str(error), error)
            return Pending(str(error))
        if broken and not isinstance(result, Acknowledged):
            self._count_drop(str(self._moving.error) if self._moving is not None else "")
            self._moving = None
        return result

    def _has_moved(self) -> bool:
        """Whether all of it is at the slaves; they write it and begin while nobody asks."""
        moving = self._moving
        return moving is not None and moving.over and moving.error is None

    async def _follow_result(self, result: Result) -> None:
        match result:
            case SeedGranted():
                await self._begin_transfer(result)
            case Pending(reason):
                self._say_waits(reason, UnavailableSlave(f"nothing has moved for {self._wait_s:g} s: {reason}"))
            case Dropped(reason):
                self._count_drop(reason)
                if self._moving is not None:
                    await self._moving.end()
                    self._moving = None
            case Refused():
                raise ConfigError(result.reason)
            case _:
                raise UnavailableMaster(f"the master answered {type(result).__name__} to `dips seed`")

    async def _begin_transfer(self, granted: SeedGranted) -> None:
        """Move what was granted, unless it moves already."""
        if self._moving is not None and self._moving.granted.push == granted.push:
            return
        if self._moving is not None:
            await self._moving.end()
        moving = self._moving = _Moving(granted)
        moving.task = asyncio.create_task(asyncio.to_thread(self._move, moving))

    def _move(self, moving: _Moving) -> None:
        """On a thread of its own. What breaks is asked for again."""
        grant, push = moving.granted.grant, moving.granted.push
        identity = TransferIdentity(self._run, push.cluster, push.inc, push.seq, 0, self._keys)
        try:
            pieces = [p for p in self._pieces if p.layer in _layers_of(grant)]
            push_pieces(grant, identity, pieces, stall_s=STALL_S, cancel=moving.cancel, progress=self._on_rate)
        except DipsError as error:
            moving.error = error

    def _on_rate(self, rate: TransferRate) -> None:
        if rate.bytes_per_s or rate.nbytes >= rate.total:
            self._progress_at = time.monotonic()
        self._watch.on_rate(rate)

    def _say_waits(self, reason: str, error: DipsError) -> None:
        self._watch.on_wait(reason)
        if time.monotonic() - self._progress_at > self._wait_s:
            raise error

    def _count_drop(self, reason: str) -> None:
        self._drops += 1
        self._watch.on_wait(f"begins anew: {reason}")
        if self._drops >= MOST_DROPS:
            raise UnavailableSlave(f"given up after {MOST_DROPS} attempts, the last one: {reason}")


def list_seed_pieces(manifest: Manifest, tensors: Tensors) -> list[Piece]:
    """Every parameter of a model, whole."""
    flats = (
        (l, p, np.ascontiguousarray(tensors[parameter.name], dtype=np.float32).reshape(-1))
        for l, layer in enumerate(manifest.layers)
        for p, parameter in enumerate(layer.parameters)
    )
    return [Piece(l, p, 0, flat.size, flat) for l, p, flat in flats if flat.size]


def _layers_of(grant: Grant) -> set[int]:
    return {layer for slave in grant.slaves for layer in slave.layers}


async def await_master(master: Endpoint, watch: SeedWatch, wait_s: float) -> dict[str, Any]:
    """The master's status, as soon as it answers; raise UnavailableMaster after `wait_s`."""
    from dips.commands.status import ask_status

    until = time.monotonic() + wait_s
    while True:
        try:
            return await ask_status(master)
        except UnavailableMaster as error:
            if time.monotonic() >= until:
                raise
            watch.on_wait(str(error))
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(ASK_S)
