"""The receiver of pushes: checks that ranks cover each layer exactly once, and plans which chunks to ask for."""

from __future__ import annotations

import threading
from dataclasses import field
from enum import Enum
from math import inf

import numpy as np

from dips.codecs import Codec
from dips.dataclass import dataclass
from dips.ids import PushId
from dips.protocol.heartbeats import Transfer
from dips.slave.ports import (
    Arrays,
    FrameRefused,
    Move,
    PushOver,
    RankMoved,
    Say,
    Staged,
    Tombstones,
    Wake,
    error_message,
)
from dips.transport.intake import MOST_EACH, Intake, LinkRate, Rate, Transit, Turns, pool_cost
from dips.wire.chunks import LayerLayout, check_steps, describe_uncovered, put_body
from dips.wire.frame import (
    CHECKSUMS,
    BadFrame,
    Buffer,
    FrameGuard,
    Header,
    Kind,
    Range,
    StreamName,
    Welcome,
    encode_done,
    encode_ranges,
    encode_want,
    encode_welcome,
)

# ---- incoming push --------------------------------------------------------------------------------------------------
# The receiver's state of one open push: its ranks, their ranges and streams, and its progress.
#
# Pure bookkeeping under the receiver's lock.


SLOW_S = 1.0  # silence after which a stream that was asked loses its turn to others


class PushPhase(Enum):
    """Phases of a push: gathering HELLOs → moving → frozen; refused from the first two; over when dropped."""

    GATHERING = "waits for HELLOs"
    MOVING = "moving"
    FROZEN = "staged"
    REFUSED = "refused"
    OVER = "dropped"


@dataclass(eq=False, slots=True)
class InStream:
    """One rank's stream on one lane; chunks are kept when a reconnect raises the epoch."""

    push: IncomingPush
    rank: int
    lane: int
    pieces: tuple[Range, ...]
    intake: Intake
    epoch: int
    stream: int
    peer: bytes
    ready: int  # number of its pieces that may be asked for
    first_byte_at: float = inf  # infinite before it has come

    def is_slow(self, now: float) -> bool:
        """Whether the stream was asked and no byte has come for SLOW_S."""
        return bool(self.intake.in_flight) and now - self.intake.last_byte_at >= SLOW_S

    def done_message(self) -> Say:
        """Return the message that tells the rank that all its bytes are here."""
        return Say(self.lane, self.peer, Kind.DONE, self.stream, encode_done(self.intake.total))


@dataclass(eq=False, slots=True)
class IncomingPush:
    """One open push."""

    push: PushId
    places: dict[int, int]  # rank → its place in the line of all pushes
    targets: Arrays  # layer → its buffer; empty when nothing may be written any more
    codec: Codec
    total: int  # encoded bytes; until all ranks are here, as if no rank cut a block in two
    gather_s: float  # longest wait after a HELLO for the next one
    moved_at: float  # when the last byte came, or a rank for the first time
    rate: Rate
    phase: PushPhase = PushPhase.GATHERING
    reason: str = ""
    code: str = "refused"  # error code for ranks whose HELLO comes after its refusal
    copying: int = 0  # threads that may be writing into a target
    streams: dict[tuple[int, int], InStream] = field(default_factory=dict)  # (rank, lane)

    @property
    def live(self) -> bool:
        return self.phase in (PushPhase.GATHERING, PushPhase.MOVING)

    @property
    def ranges(self) -> int:
        """Number of ranges in its HELLOs."""
        return sum(len(stream.pieces) for stream in self.streams.values())

    @property
    def received_bytes(self) -> int:
        """Bytes that are in place."""
        return sum(s.intake.total - s.intake.left for s in self.streams.values())

    @property
    def is_whole(self) -> bool:
        """Whether every rank's stream has brought all of its ranges."""
        return all(s.intake.complete for s in self.streams.values())

    def list_moved(self) -> tuple[RankMoved, ...]:
        """Return when the bytes of each rank came, over all lanes; ranks without bytes are left out."""
        moved: dict[int, list[InStream]] = {}
        for (rank, _), stream in sorted(self.streams.items(), key=lambda item: item[0]):
            if stream.first_byte_at < inf:
                moved.setdefault(rank, []).append(stream)
        return tuple(
            RankMoved(
                rank,
                sum(s.intake.total - s.intake.left for s in streams),
                min(s.first_byte_at for s in streams),
                max(s.intake.last_byte_at for s in streams),
            )
            for rank, streams in moved.items()
        )

    def silent_since(self) -> float | None:
        """Return the time of the last byte while ranks owe bytes; None while they owe none. Ranks owe nothing before
        all of them are here, while the push waits for its turn or for room in the pool, or for chunks that have arrived
        and are being checked.
        """
        if self.phase is not PushPhase.MOVING:
            return None
        owing = [s.intake.last_byte_at for s in self.streams.values() if s.intake.in_flight]
        return max(self.moved_at, *owing) if owing else None

    def over_at(self, stall_s: float) -> float:
        """Return when the push ends unless bytes come: by a stall, or because the last ranks have not come."""
        if self.phase is PushPhase.GATHERING:
            return self.moved_at + self.gather_s if self.streams else inf
        silent_since = self.silent_since()
        return inf if silent_since is None else silent_since + stall_s

    def refuse_hello(
        self, lane: int, name: StreamName, pieces: tuple[Range, ...], misfit: str | None
    ) -> tuple[str, str] | None:
        """Return (code, message) if this HELLO may not join, else None.

        misfit  why its ranges do not match the layers held here
        """
        if self.phase is PushPhase.REFUSED:
            return self.code, f"push {self.push} was refused: {self.reason}"
        if name.rank not in self.places or name.lane != lane or name.version:
            return "invalid", f"push {self.push} has ranks {sorted(self.places)}, got {name} on lane {lane}"
        known = self.streams.get((name.rank, lane))
        if known is None:
            return ("ranges", f"rank {name.rank}: {misfit}") if misfit else None
        if name.epoch <= known.epoch:
            return "stale_push", f"epoch {name.epoch} of rank {name.rank} is over, {known.epoch} is the last"
        if pieces != known.pieces:
            return "invalid", f"rank {name.rank} names other ranges than before its connection broke"
        return None

    def find_problems(self, layout: LayerLayout) -> list[str]:
        """Describe where the ranges of all ranks overlap, leave gaps or are outside; [] if each element has one."""
        claims: dict[str, list[Range]] = {}
        for (rank, _), stream in sorted(self.streams.items()):
            outside = layout.describe_outside(stream.pieces)
            if outside:
                return [f"rank {rank}: {outside}"]
            claims.setdefault(f"rank {rank}", []).extend(stream.pieces)
        return describe_uncovered(layout, claims)

    def describe_missing(self, lanes: int) -> str:
        """Describe the missing ranks, those that miss on some of the lanes, or the missing bytes, for people."""
        silent = sorted(set(self.places) - {rank for rank, _ in self.streams})
        if silent:
            return f"ranks {silent} never said HELLO"
        silent_on = {lane: sorted(r for r in self.places if (r, lane) not in self.streams) for lane in range(lanes)}
        if any(silent_on.values()):
            return "; ".join(
                f"ranks {ranks} never said HELLO on lane {lane}" for lane, ranks in silent_on.items() if ranks
            )
        return ", ".join(
            f"rank {rank} brought {s.intake.total - s.intake.left} of {s.intake.total} bytes"
            for (rank, _), s in sorted(self.streams.items())
            if not s.intake.complete
        )


@dataclass(frozen=True, slots=True)
class ClaimedChunk:
    """A chunk that was asked for and came; its body is not yet verified."""

    stream: InStream
    chunk: Range
    header: Header
    body: Buffer
    guard: FrameGuard


# ---- receiver -------------------------------------------------------------------------------------------------------
# The receiver of pushes: checks that ranks cover each layer exactly once, plans which chunks to ask for, and places
# them.
#
# All ranks say HELLO first; together they must cover each of the slave's layers exactly once. Then each is asked, in
# turn, for its missing chunks. When the last chunk is in its place the push is frozen and its buffers are no longer
# written. No socket, no clock: peers are bytes, `now` is an argument, actions are returned (ports.py). Lanes and their
# stages share it; the lock guards bookkeeping only and is not held during a checksum or a copy of parameters.


# In HELLOs of all open pushes. Limits memory that is in no sum of a slave's and that peers choose: 208 bytes a range,
# so 218 MB. Ranks that each hold a part of each tensor name ranks × tensors / slaves of them: 64 ranks, 50,000 tensors
# and 16 slaves use a fifth; 256 ranks and 8 slaves would need 1.6 M, and their job ends with advice.
MOST_RANGES = 1 << 20
MOST_LINKS = 4096  # clusters whose link rates are kept


def cluster_of(stream: InStream) -> str:
    return stream.push.push.cluster


class Receiver:
    """The receiver of all pushes of one slave, over all its lanes."""

    def __init__(self, lanes: int, chunk_bytes: int, pool: Transit, concurrent_streams: int, stall_s: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._pool = pool
        self._stall_s = stall_s
        self._turns: list[Turns[InStream]] = [
            Turns(concurrent_streams, sender_of=cluster_of, most_each=MOST_EACH) for _ in range(lanes)
        ]
        self._pushes: dict[PushId, IncomingPush] = {}
        self._streams: dict[tuple[int, bytes, int], InStream] = {}  # (lane, peer, stream id): present epochs only
        self._closed = Tombstones()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._starved: set[int] = set()  # lanes that could ask for more than the pool had room for
        self._layout: LayerLayout | None = None
        self._links: dict[str, LinkRate] = {}  # by cluster
        self._ranges = 0  # number of ranges in HELLOs of open pushes

    def set_layers(self, layout: LayerLayout) -> None:
        """Set the layers that this slave holds."""
        self._layout = layout

    def open_push(
        self,
        push: PushId,
        places: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        now: float,
        codec: Codec = Codec.FP32,
    ) -> None:
        """Accept the HELLOs of a push; idempotent. Chunks of a lossy codec are added to the contents of `buffers`.

        deadline_s  from each rank's HELLO to the next one's; there is none for the first, since ranks may be anywhere
                    in an inner step when their push is granted
        """
        layout = self._layout
        assert layout is not None, "set_layers() comes before open_push()"
        sizes = {layer: array.size for layer, array in buffers.items()}
        assert sizes == layout.numel, f"buffers of {sizes} elements for layers of {layout.numel}"
        with self._lock:
            if push not in self._pushes:
                total = sum(piece.nbytes for piece in encode_ranges(codec.dtype, layout.whole_layers()))
                line = dict(enumerate(places))
                self._pushes[push] = IncomingPush(push, line, buffers, codec, total, deadline_s, now, Rate(now))

    def reorder_push(self, push_id: PushId, places: tuple[int, ...]) -> None:
        """Change the places of a push's ranks; present turns go on. Ignored for an unknown push or another number of
        ranks.
        """
        with self._lock:
            push = self._pushes.get(push_id)
            if push is not None and len(push.places) == len(places):
                push.places = dict(enumerate(places))
                self._line_up()

    def _line_up(self) -> None:
        for turns in self._turns:
            turns.line_up(lambda stream: stream.push.places[stream.rank])

    def on_hello(
        self,
        lane: int,
        peer: bytes,
        name: StreamName,
        pieces: tuple[Range, ...],
        now: float,
        ready: int | None = None,
    ) -> list[Move]:
        """Register a rank's stream and its ranges, for the first time or after its connection broke.

        ready       number of `pieces` that may be asked for now; None: all
        Repetition  a HELLO at or below the stream's epoch is refused and changes nothing
        """
        assert self._layout is not None, "set_layers() comes before any HELLO"
        misfit = self._layout.describe_misfit(pieces)
        with self._lock:
            push = self._pushes.get(PushId(name.cluster, name.inc, name.seq))
            if push is None:
                return [error_message(lane, peer, name.stream_id, *self._closed.explain_not_open(name))]
            refusal = push.refuse_hello(lane, name, pieces, misfit)
            if refusal is not None:
                return [error_message(lane, peer, name.stream_id, *refusal)]
            moves = list[Move]()
            if (name.rank, lane) not in push.streams:
                if push.ranges + len(pieces) > MOST_RANGES:
                    return self._refuse_too_many(push, name, lane, peer, push.ranges + len(pieces))
                moves = self._make_room(push, len(pieces))
                if (room := MOST_RANGES - self._ranges) < len(pieces):
                    again = f"{room} ranges more can be kept beside those of other pushes: try again"
                    return [*moves, error_message(lane, peer, name.stream_id, "unknown", again)]
            pieces = encode_ranges(push.codec.dtype, pieces)
            stream = self._admit_stream(push, lane, peer, name, pieces, now)
            self._raise_ready(stream, len(pieces) if ready is None else ready)
            gathering = push.phase is PushPhase.GATHERING
            missing = sum(piece.nbytes for piece in pieces) if gathering else stream.intake.left
            welcome = encode_welcome(Welcome(missing, self._chunk_bytes))
            moves.append(Say(lane, peer, Kind.WELCOME, stream.stream, welcome))
            if gathering and len(push.streams) == len(push.places) * len(self._turns):
                return moves + self._begin_push(push, now)
            if not gathering and stream.intake.complete:
                moves.append(stream.done_message())
            return moves

    def _refuse_too_many(self, push: IncomingPush, name: StreamName, lane: int, peer: bytes, ranges: int) -> list[Move]:
        """Refuse a push with more ranges than can ever be kept; its job ends."""
        reason = (
            f"{len(push.streams) + 1} of {len(push.places) * len(self._turns)} streams name {ranges} pieces of "
            f"parameters, expected at most {MOST_RANGES} of all ranks; more slaves, or "
            "experts fused into one tensor a block make fewer"
        )
        moves = self._refuse_push(push, reason, "too_many")
        text = f"push {push.push} is refused: {reason}"
        return [*moves, error_message(lane, peer, name.stream_id, "too_many", text)]

    def _make_room(self, push: IncomingPush, ranges: int) -> list[Move]:
        """Refuse younger pushes that still gather, the youngest first, so that of two that fit only alone one can
        complete.
        """
        moves = list[Move]()
        for other in reversed(self._pushes.values()):
            if other is push or ranges <= MOST_RANGES - self._ranges:
                break
            if other.phase is PushPhase.GATHERING and other.streams:
                moves += self._refuse_push(
                    other, f"its ranges make room for those of {push.push}, which is older", "refused"
                )
        return moves

    def _admit_stream(
        self, push: IncomingPush, lane: int, peer: bytes, name: StreamName, pieces: tuple[Range, ...], now: float
    ) -> InStream:
        stream = push.streams.get((name.rank, lane))
        if stream is None:
            intake = Intake((), self._chunk_bytes, self._pool, now)  # its chunks are cut when all ranges are verified
            stream = InStream(push, name.rank, lane, pieces, intake, name.epoch, name.stream_id, peer, 0)
            push.streams[name.rank, lane] = stream
            self._ranges += len(pieces)
            push.moved_at = now
        else:
            del self._streams[lane, stream.peer, stream.stream]
            stream.epoch, stream.stream, stream.peer = name.epoch, name.stream_id, peer
            stream.intake.on_connection_lost()
        self._streams[lane, peer, name.stream_id] = stream
        return stream

    def _begin_push(self, push: IncomingPush, now: float) -> list[Move]:
        """Begin to ask when all ranks are here; refuse the push if their ranges do not fit together."""
        assert self._layout is not None
        problems = push.find_problems(self._layout)
        if problems:
            return self._refuse_push(push, "; ".join(problems), "ranges")
        push.phase = PushPhase.MOVING
        moves: list[Move] = []
        for rank in sorted(push.places, key=push.places.__getitem__):
            for lane, turns in enumerate(self._turns):
                stream = push.streams[rank, lane]
                chunk_bytes = push.codec.chunk_bytes(self._chunk_bytes)
                link = self._link_of(push.push.cluster)
                stream.intake = Intake(stream.pieces, chunk_bytes, self._pool, now, link, stream.ready)
                if stream.intake.complete:
                    moves.append(stream.done_message())
                elif not stream.intake.idle:
                    turns.enter_line(stream)
                    moves.append(Wake(lane))
        push.total = sum(stream.intake.total for stream in push.streams.values())
        self._line_up()
        return moves + self._freeze_if_whole(push)

    def on_ready(self, lane: int, peer: bytes, stream_id: int, ready: int) -> list[Move]:
        """Allow to ask for the first `ready` ranges of a stream; raise BadFrame if it is unknown or has fewer.

        Repetition: a number that is not above the last changes nothing.
        """
        with self._lock:
            stream = self._streams.get((lane, peer, stream_id))
            if stream is None:
                raise BadFrame("stream", f"no stream {stream_id:016x} on this connection")
            if ready > len(stream.pieces):
                raise BadFrame("message", f"{ready} ranges are ready, the HELLO named {len(stream.pieces)}")
            self._raise_ready(stream, ready)
            return [Wake(lane)]

    def _raise_ready(self, stream: InStream, ready: int) -> None:
        stream.ready = max(stream.ready, ready)
        stream.intake.release_pieces(stream.ready)  # it has no chunks before all ranks are here
        if stream.push.phase is PushPhase.MOVING and not stream.intake.idle:
            self._turns[stream.lane].enter_line(stream)

    def _link_of(self, cluster: str) -> LinkRate:
        while len(self._links) >= MOST_LINKS and cluster not in self._links:
            del self._links[next(iter(self._links))]
        return self._links.setdefault(cluster, LinkRate())

    def plan_wants(self, lane: int, now: float) -> list[Move]:
        """Return the WANTs that this lane may send now."""
        with self._lock:
            turns, moves = self._turns[lane], list[Move]()
            if turns.empty:
                return moves
            for stream in turns.rotate_turns(drained=lambda s: s.intake.in_flight == 0, slow=lambda s: s.is_slow(now)):
                for unit in stream.intake.ask_chunks(now, turns.bytes_left(stream)):
                    turns.spend_bytes(stream, sum(chunk.nbytes for chunk in unit))
                    moves.append(Say(lane, stream.peer, Kind.WANT, stream.stream, encode_want(unit)))
            if self._pool.limit - self._pool.used_bytes < pool_cost(self._chunk_bytes):
                self._starved.add(lane)
            return moves

    def claim_chunk(
        self, lane: int, peer: bytes, header: Header, body: Buffer, now: float, guard: FrameGuard = CHECKSUMS
    ) -> ClaimedChunk:
        """Accept a CHUNK that was asked for; raise BadFrame if it was not. `stage_chunk` must follow."""
        with self._lock:
            stream = self._streams.get((lane, peer, header.stream))
            if stream is None:
                raise BadFrame("stream", f"no stream {header.stream:016x} on this connection")
            if stream.push.phase is not PushPhase.MOVING:
                raise BadFrame("unasked", f"push {stream.push.push} is {stream.push.phase.value}")
            if header.dtype is not stream.push.codec.dtype:
                granted = stream.push.codec
                raise BadFrame("type", f"push {stream.push.push} is granted in {granted}, not {header.dtype.name}")
            chunk = stream.intake.claim_chunk(header, now)
            if chunk is None:
                raise BadFrame("unasked", f"{header} of push {stream.push.push} was not asked for")
            stream.push.moved_at = now
            stream.first_byte_at = min(stream.first_byte_at, now)
            return ClaimedChunk(stream, chunk, header, body, guard)

    def stage_chunk(self, claim: ClaimedChunk) -> list[Move]:
        """Verify a claimed chunk and copy it into its place; if it is wrong, undo the claim and raise BadFrame. After
        any other exception `give_up` must follow.

        A scale that is not finite arrived as it was sent, and would arrive again: the push is refused, before anything
        is written.
        """
        stream, push = claim.stream, claim.stream.push
        with self._lock:
            if not push.live:
                stream.intake.drop_claim(claim.chunk)
                return []
            push.copying += 1
        wrong: BadFrame | None = None
        try:
            self._place_chunk(claim)
        except BadFrame as refused:
            wrong = refused
        finally:
            with self._lock:
                push.copying -= 1
                if not push.copying:
                    self._changed.notify_all()
        with self._lock:
            if push.phase is not PushPhase.MOVING:
                stream.intake.drop_claim(claim.chunk)
                return []
            if wrong is not None and wrong.reason == "step":
                stream.intake.drop_claim(claim.chunk)
                return [FrameRefused(wrong.reason), *self._refuse_push(push, f"{claim.chunk}: {wrong}", "refused")]
            if wrong is not None:
                stream.intake.mark_wrong(claim.chunk)
                raise wrong
            stream.intake.mark_received(claim.chunk)
            return self._after_chunk(stream)

    def give_up(self, claim: ClaimedChunk, error: Exception) -> list[Move]:
        """Undo a claim whose chunk could not be placed, by lack of memory or a bug, and refuse its push."""
        push = claim.stream.push
        with self._lock:
            claim.stream.intake.drop_claim(claim.chunk)
            if not push.live:
                return []
            return self._refuse_push(push, f"{claim.chunk} could not be placed: {error!r}", "refused")

    def _place_chunk(self, claim: ClaimedChunk) -> None:
        """Verify a chunk and write it; what is wrong may leave garbage in the place of an fp32 one, which is filled
        anew, and never touches the base of a lossy one.
        """
        codec, targets = claim.stream.push.codec, claim.stream.push.targets
        if not targets:
            return  # dropped since the claim: nothing may be written, and `drop_push` may have returned
        assert self._layout is not None
        begin, end = self._layout.place_range(claim.chunk)
        target = targets[claim.chunk.layer][begin:end]
        if not codec.lossy:
            claim.guard.open_into(claim.header, claim.body, target.view(np.uint8))
            return
        body = claim.guard.open_frame(claim.header, claim.body)
        check_steps(codec, body, claim.chunk.length)
        put_body(codec, body, target)

    def _after_chunk(self, stream: InStream) -> list[Move]:
        """Return the actions that a chunk in its place makes possible."""
        lanes, self._starved = self._starved, set()  # other lanes ask after their next read, without a wake-up
        if stream.intake.idle:  # a stream without chunks to ask for must not hold a turn
            self._turns[stream.lane].leave_line(stream)
            lanes = lanes | {stream.lane}
        wakes = [Wake(lane) for lane in sorted(lanes)]
        if not stream.intake.complete:
            return list(wakes)
        return [stream.done_message(), *wakes, *self._freeze_if_whole(stream.push)]

    def _freeze_if_whole(self, push: IncomingPush) -> list[Move]:
        if push.phase is not PushPhase.MOVING or not push.is_whole:
            return []
        push.phase = PushPhase.FROZEN
        push.targets = {}
        return [Staged(push.push, push.total, push.list_moved())]

    def tick(self, now: float) -> list[Move]:
        """Refuse pushes that stall: ranks owe bytes and are silent, or the last ranks do not follow the first."""
        moves: list[Move] = []
        with self._lock:
            for push in [push for push in self._pushes.values() if push.live]:
                push.rate.record_bytes(push.received_bytes, now)
                if now >= push.over_at(self._stall_s):
                    gathering = push.phase is PushPhase.GATHERING
                    what = f"deadline: no HELLO for {push.gather_s:g} s" if gathering else ""
                    what = what or f"no new bytes for {self._stall_s:g} s"
                    moves += self._refuse_push(push, f"{what}; {push.describe_missing(len(self._turns))}", "refused")
        return moves

    def _refuse_push(self, push: IncomingPush, reason: str, code: str) -> list[Move]:
        text = f"push {push.push} is refused: {reason}"
        moves: list[Move] = [error_message(s.lane, s.peer, s.stream, code, text) for s in push.streams.values()]
        push.code = code
        self._stop_push(push, PushPhase.REFUSED, reason)
        return [*moves, PushOver(push.push, reason)]

    def drop_push(self, push_id: PushId) -> None:
        """Forget a push; its buffers are not written after this returns. Waits for a copy of one chunk at most."""
        with self._lock:
            push = self._pushes.get(push_id)
            if push is None:
                return
            self._forget_push(push)

    def drop_all(self) -> None:
        """Forget every push, for a new incarnation of the slave."""
        with self._lock:
            for push in list(self._pushes.values()):
                self._forget_push(push)

    def _forget_push(self, push: IncomingPush) -> None:
        self._stop_push(push, PushPhase.OVER, push.reason)
        if self._pushes.pop(push.push, None) is not None:
            self._closed.close(push.push)

    def _stop_push(self, push: IncomingPush, phase: PushPhase, reason: str) -> None:
        """Stop all writes of a push: release the credit of its streams and wait for copies in progress."""
        push.phase, push.reason, push.targets = phase, reason, {}
        for stream in push.streams.values():
            stream.intake.on_connection_lost()
            self._turns[stream.lane].leave_line(stream)
            self._streams.pop((stream.lane, stream.peer, stream.stream), None)
            self._ranges -= len(stream.pieces)
            stream.pieces = ()
        while push.copying:
            self._changed.wait()

    def list_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that move now."""
        with self._lock:
            return tuple(
                Transfer(p.push.cluster, p.push.inc, p.push.seq, True, p.received_bytes, p.total, p.rate.bytes_per_s)
                for p in self._pushes.values()
                if p.live
            )
