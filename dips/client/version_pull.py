"""Pulling versions of a run into memory from any host that reaches the master and the slaves, without a cluster or
torch: one (`dips export --master`), or each that follows (`dips follow`, `dips.follow`).

A VersionPuller joins under a name that only pulls (`ids.reads_only`), renews its lease by heartbeats, whose answers
name the head, pulls versions as every cluster does, and leaves. No round waits for it, it never has a slot, and slaves
keep no buffer for it: one that is too slow for updates is told, and pulls the newest version whole. Two pullers with
one name exclude each other.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, pairwise
from math import inf
from types import TracebackType
from typing import Any

from dips.client.agent.agent import MasterLink
from dips.client.rank.transfer import TransferIdentity, TransferRate, TransferStats, pull_pieces
from dips.errors import Busy, ConfigError, Denied, DipsError, Stale, StaleIncarnation, Unavailable, UnavailableMaster
from dips.ids import PULLER, PullId, VersionId, check_name
from dips.protocol.effects import Dropped, Finished, Grant, Joined, Pending, Refused, Result
from dips.protocol.enums import Activity, ClusterStanding, TrainerState
from dips.protocol.events import ClusterJoined, ClusterLeft, PullFinished, PullRequested
from dips.protocol.heartbeats import ClusterHeartbeat
from dips.protocol.manifest import Manifest
from dips.transport import control, seal
from dips.transport.endpoints import Endpoint
from dips.wire.chunks import F32, Piece
from dips.wire.generated.status_pb2 import DescribeRequest
from dips.wire.generated.status_pb2_grpc import StatusServiceStub

CALL_S = 10.0
HEARTBEAT_S = 2.0  # longest pause between two heartbeats
LEASE_HEARTBEATS = 5  # heartbeats per lease, as clusters send them
JOIN_S = 30.0  # for a former process with this name to fall silent; or a lease, if that is longer
GRANT_S = 60.0  # for the slaves to register and to pin the version
RETRY_S = 0.2
AGAIN_S = 2.0  # until a follower joins again; a refusal that heals meanwhile ends none, as it ends no agent
HEALED_S = 60.0  # after a refusal, another one is final until it has been a member for so long
STALL_S = 30.0  # without a byte of a transfer

# (run, version, manifest) → an array for all parameters, concatenated in the manifest's order.
LayerDigests = tuple[str, str]  # of θ and of m
MakeRoom = Callable[[str, VersionId, Manifest], F32]
Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """The version that was pulled, with statistics of its transfer."""

    version: VersionId
    stats: TransferStats


def pulling_name(master: Endpoint, name: str) -> str:
    """Return the name under which to join: that of the certificate; in plain text `name`, as one that only pulls."""
    return f"{name}{PULLER}" if master.tls is None else master.tls.read_current().identity.cluster_name


async def pull_version(
    master: Endpoint, name: str, make_room: MakeRoom, version: VersionId | None = None
) -> PulledVersion:
    """Pull a version of the run of `master` as a VersionPuller named `name`, which leaves again.

    version  a version that the slaves still keep; None: the head
    Errors   those of VersionPuller and of its `pull`
    """
    async with VersionPuller(master, name) as puller:
        return await puller.pull(make_room, version)


class VersionPuller:
    """One incarnation that only pulls, from `async with` to its end. It has joined, and its heartbeats keep its lease.

    Attributes: `run`, `manifest` and `shared` options of the run; `head`, its newest version as of the last heartbeat,
    at most two seconds ago; `finished`, the version with which the run has ended, None while it goes on.

    Errors of `async with`: UnavailableMaster; Denied: the name belongs to another, or may not pull.
    """

    def __init__(self, master: Endpoint, name: str) -> None:
        self._master, self._name = master, check_name(name, "puller")
        self._rate = TransferRate(0, 0, 0.0)
        self._inc = self._seq = 0
        self._told = asyncio.Event()  # set by each heartbeat's answer, and by the end of the lease

    async def __aenter__(self) -> VersionPuller:
        described = await _describe_run(self._master)
        self.run, self.manifest = str(described["run"]), Manifest.from_json(described["manifest"])
        self._master.require_run(self.run)
        self.shared: dict[str, Any] = described["shared"]
        self._link = MasterLink(self._master, self.shared)
        try:
            joined = await self._join(described["config_digest"])
        except BaseException:
            await self._link.close()
            raise
        self._inc, self.head, self.finished = joined.inc, joined.head, joined.progress.finished
        self._lease = asyncio.create_task(self._keep_lease())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._lease.cancel()
        await asyncio.gather(self._lease, return_exceptions=True)
        try:
            await self._link.ask_master(ClusterLeft(0, self._name, self._inc, 0))
        except (UnavailableMaster, Busy):
            pass  # its lease runs out
        finally:
            await self._link.close()

    async def pull(
        self, make_room: MakeRoom, version: VersionId | None = None, held: VersionId | None = None
    ) -> PulledVersion:
        """Fill the array of `make_room` with a version; all slaves have sent all of it when this returns.

        version  a version that the slaves still keep; None: the head
        held     the version that the array holds now, so that slaves may send updates to it; None: none
        Errors   UnavailableMaster, UnavailableSlave; ConfigError: the version is no longer kept; StaleVersion: slaves
                 gave the updates up for newer ones; StaleIncarnation: the lease ran out. The array's contents are
                 undefined then. Also the errors of `make_room`
        """

        async def make_pieces(grant: Grant) -> list[Piece]:
            room = await asyncio.to_thread(make_room, self.run, grant.version, self.manifest)
            return list_pieces(self.manifest, room)

        grant, stats = await self._pull(version, False, make_pieces, held)
        return PulledVersion(grant.version, stats)

    async def pull_layers(self, version: VersionId, layers: Mapping[int, tuple[F32, F32]]) -> dict[int, LayerDigests]:
        """Fill θ and m of some layers of a version that the slaves keep, m from their snapshots; return the digests
        that the slaves have of each of these layers, of θ and of m, with which the caller compares what has come.

        layers  index → flat arrays for θ and m
        Errors  those of `pull`
        """

        def choose_pieces(part: int) -> Callable[[Grant], Awaitable[list[Piece]]]:
            async def make_pieces(_: Grant) -> list[Piece]:
                parts = (list_pieces(self.manifest, flats[part], [index]) for index, flats in layers.items())
                return list(chain.from_iterable(parts))

            return make_pieces

        grant, _ = await self._pull(version, True, choose_pieces(1), None)
        await self._pull(version, False, choose_pieces(0), None)
        told = (zip(s.layers, zip(s.digests[::2], s.digests[1::2], strict=True), strict=True) for s in grant.slaves)
        return {index: digests for index, digests in chain.from_iterable(told) if index in layers}

    async def _pull(
        self,
        version: VersionId | None,
        momentum: bool,
        make_pieces: Callable[[Grant], Awaitable[list[Piece]]],
        held: VersionId | None,
    ) -> tuple[Grant, TransferStats]:
        self._seq += 1
        pull, keys = PullId(self._name, self._inc, self._seq), seal.new_keys()
        self._rate = TransferRate(0, 0, 0.0)
        grant = await self._await_grant(PullRequested(0, pull, 1, version, (keys.public,), momentum=momentum))
        installed = False
        try:
            identity = TransferIdentity(self.run, pull.cluster, pull.inc, pull.seq, 0, keys)
            stats = await self._move(grant, identity, await make_pieces(grant), held)
            installed = True
        finally:
            with suppress(DipsError):  # then its next request ends it, or its lease
                await self._link.ask_master(PullFinished(0, pull, installed))
        return grant, stats

    @property
    def is_over(self) -> bool:
        """Whether the incarnation has ended, so that nothing can be pulled by it any more."""
        return self._lease.done()

    async def wait_for_news(self, held: VersionId | None) -> bool:
        """Return True once the run's head is not `held`, False once the run has ended with it. Raises StaleIncarnation,
        Denied.
        """
        while self.head == held and self.finished != held:
            self._told.clear()
            if self._lease.done():
                self._lease.result()
            await self._told.wait()
        return self.head != held

    async def _join(self, config_digest: str) -> Joined:
        """Join; wait for the lease of a process that had the name before."""
        event = ClusterJoined(0, self._name, uuid.uuid4().hex, self.run, self.manifest.digest, config_digest)
        began = asyncio.get_running_loop().time()
        while True:
            answer = await self._link.ask_master(event)
            if isinstance(answer, Joined):
                return answer
            passed_s = asyncio.get_running_loop().time() - began
            match answer:
                case Pending():  # it is silent: its lease ends
                    pass
                case Refused() if passed_s < max(JOIN_S, LEASE_HEARTBEATS * answer.retry_after_s):
                    pass
                case _:
                    raise _unexpected("Joined", answer)
            await asyncio.sleep(HEARTBEAT_S)

    async def _move(
        self, grant: Grant, identity: TransferIdentity, pieces: list[Piece], held: VersionId | None
    ) -> TransferStats:
        """Transfer the bytes in a thread; it has ended when this returns, also after a cancellation or a lost lease."""
        cancel = threading.Event()

        def report_rate(rate: TransferRate) -> None:
            self._rate = rate

        def move() -> TransferStats:
            return pull_pieces(grant, identity, pieces, stall_s=STALL_S, cancel=cancel, progress=report_rate, held=held)

        moving = asyncio.create_task(asyncio.to_thread(move))
        try:
            await asyncio.wait((moving, self._lease), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            cancel.set()
            await asyncio.gather(moving, return_exceptions=True)
            raise
        if moving.done():
            return moving.result()
        cancel.set()
        await asyncio.gather(moving, return_exceptions=True)
        self._lease.result()
        raise AssertionError("a lease ends by an error")

    async def _await_grant(self, question: PullRequested) -> Grant:
        """Ask the master until the slaves have pinned the version; return the grant."""
        why = "it does not answer"
        try:
            async with asyncio.timeout(GRANT_S):
                while True:
                    if self._lease.done():
                        self._lease.result()
                    result = await self._link.ask_master(question)
                    match result:
                        case Grant():
                            return result
                        case Pending(reason):
                            why, pause_s = reason, RETRY_S
                        case Refused():
                            why, pause_s = result.reason, result.retry_after_s
                        case _:
                            raise _unexpected("a grant", result)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise UnavailableMaster(f"no pull was granted within {GRANT_S:g} s: {why}") from None

    async def _keep_lease(self) -> None:
        """Send heartbeats and learn the head; raise StaleIncarnation if the incarnation was replaced or its lease ran
        out.
        """
        try:
            await self._send_heartbeats()
        finally:
            self._told.set()

    async def _send_heartbeats(self) -> None:
        pause_s = HEARTBEAT_S
        while True:
            rate = self._rate
            heartbeat = ClusterHeartbeat(
                self._name, self._inc, TrainerState.STARTING, Activity.PULL, 0, 0, 0, 0, 0.0, None,
                rate.nbytes, rate.total, rate.bytes_per_s, transfer_seq=self._seq,
                    )  # fmt: skip
            try:
                answer = await self._link.send_heartbeat(heartbeat, CALL_S)
            except (UnavailableMaster, Busy):
                pass  # it may come back within the lease; a transfer needs it only at its end
            else:
                if answer.standing is not ClusterStanding.LIVE:
                    why = "another one joined by this name, or the lease ran out"
                    raise StaleIncarnation(f"{self._name}/{self._inc} is {answer.standing}: {why}")
                self.head, self.finished = answer.head or self.head, answer.progress.finished
                self._told.set()
                pause_s = min(HEARTBEAT_S, answer.lease_s / LEASE_HEARTBEATS)
            await asyncio.sleep(pause_s)


async def follow_versions(
    master: Endpoint, name: str, make_room: MakeRoom, take: Callable[[VersionId], Awaitable[None]], warn: Warn
) -> VersionId:
    """Pull the newest version of a run again and again; return the last one once the run has ended with it.

    make_room  called before each pull. Its array must hold what was pulled last, or all of the next is moved: it may
               be another array with a copy
    take       called with each version that is whole: a later one than the last or, after a rollback, an earlier one;
               the last one again, if a pull that failed has overwritten it. The next is pulled when it returns;
               versions that pass meanwhile are left out
    warn       called with a sentence when master or slaves do not answer, which is tried again
    Errors     those of VersionPuller until a version has come; then Denied, if that is tried again in vain,
               ConfigError, those of `make_room`, `take`
    """
    following, refused = _Following(master, name, make_room, take, warn), False
    while True:
        try:
            return await following.join_and_pull()
        except (Unavailable, Busy, Stale, Denied) as error:
            denied, refused = isinstance(error, Denied), refused and not following.is_healed
            if not following.has_pulled or (denied and refused):
                raise
            refused |= denied
            warn(f"{error}; tried again in {AGAIN_S:g} s")
            await asyncio.sleep(AGAIN_S)


@dataclass(slots=True)
class _Following:
    """The state of a follower over its incarnations."""

    master: Endpoint
    name: str
    make_room: MakeRoom
    take: Callable[[VersionId], Awaitable[None]]
    warn: Warn
    has_pulled: bool = False  # a version; until then the caller is told what fails, and may be wrong
    held: VersionId | None = None  # by the array; None: nothing whole
    followed: tuple[str, str] | None = None  # run, and digest of its model; None: it has not joined yet
    joined_at: float = inf  # the last incarnation; inf: it has not

    @property
    def is_healed(self) -> bool:
        return time.monotonic() >= self.joined_at + HEALED_S

    async def join_and_pull(self) -> VersionId:
        """Follow as one incarnation; return the run's last version."""
        self.joined_at = inf
        async with VersionPuller(self.master, self.name) as puller:
            found = puller.run, puller.manifest.digest
            if self.followed not in (None, found):  # the array, and what was made of it, are of the former model
                raise ConfigError(
                    f"{self.master.address} now serves another run or model ({puller.run}): follow it anew"
                )
            self.followed, self.joined_at = found, time.monotonic()
            while await puller.wait_for_news(self.held):
                try:
                    await self._pull_version(puller)
                except (Unavailable, Busy, Stale) as error:
                    if puller.is_over or not self.has_pulled:
                        raise
                    self.warn(f"{error}; tried again in {AGAIN_S:g} s")
                    await asyncio.sleep(AGAIN_S)
        assert self.held is not None, "a run has a version from its beginning"
        return self.held

    async def _pull_version(self, puller: VersionPuller) -> None:
        before, self.held = self.held, None  # while it moves
        self.held, self.has_pulled = (await puller.pull(self.make_room, held=before)).version, True
        await self.take(self.held)


async def _describe_run(master: Endpoint) -> dict[str, Any]:
    channel = control.open_channel(master)
    try:
        reply = await control.call_method(
            StatusServiceStub(channel).Describe, DescribeRequest(), deadline_s=CALL_S,
            peer=master, unavailable=UnavailableMaster, explain=True,
        )  # fmt: skip
    finally:
        await channel.close()
    described: dict[str, Any] = json.loads(reply.json)
    return described


def list_pieces(manifest: Manifest, room: F32, layers: Iterable[int] | None = None) -> list[Piece]:
    """Return all parameters as pieces of one flat array; or those of some layers."""
    chosen = range(len(manifest.layers)) if layers is None else layers
    sizes = [(l, p, parameter.numel) for l in chosen for p, parameter in enumerate(manifest.layers[l].parameters)]
    ends = [0]
    for _, _, numel in sizes:
        ends.append(ends[-1] + numel)
    return [
        Piece(l, p, 0, numel, room[begin:end])
        for (l, p, numel), (begin, end) in zip(sizes, pairwise(ends), strict=True)
        if numel
    ]


def _unexpected(wanted: str, result: Result) -> Exception:
    if isinstance(result, Finished):
        return UnavailableMaster(f"the run is finished at {result.version}, which is not to be pulled any more")
    reason = getattr(result, "reason", "")
    if isinstance(result, Dropped):
        return UnavailableMaster(f"the pull was dropped: {reason}")
    return Denied(f"expected {wanted}, the master answered {type(result).__name__}: {reason}")
