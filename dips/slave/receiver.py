"""Pushes coming in: who brings what, whether it is all of it and only once, what to ask next, what is here.

All ranks say HELLO first; together they must cover each of the slave's layers exactly once. Then each is asked, in
turn, for what is missing. When the last chunk is in its place the push is frozen: nothing is written any more.
No socket, no clock: peers are bytes, `now` is an argument, what is to be done is returned (moves.py). Lanes and their
stages share it; the lock guards bookkeeping only and is held over no checksum and no copy of parameters.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from enum import Enum

from dips.ids import PushId
from dips.protocol.heartbeats import Transfer
from dips.slave.moves import Closed, Move, PushOver, Say, Staged, Wake, error
from dips.slave.ports import Arrays
from dips.transport.intake import Intake
from dips.transport.pool import Transit
from dips.transport.rate import Rate
from dips.transport.turns import Turns
from dips.wire import codecs, streams
from dips.wire.chunks import Layout, Range, uncovered
from dips.wire.codecs import Codec
from dips.wire.frame import BadFrame, Buffer, Header, Kind, check_body
from dips.wire.streams import StreamName, Welcome

SLOW_S = 1.0  # silence after which a stream that was asked loses its turn to others

Key = tuple[PushId, int]  # a stream's place in the turns of its lane: push and rank


class Phase(Enum):
    """A push: gathering HELLOs → moving → frozen; refused from the first two; over when dropped."""

    GATHERING = "waits for HELLOs"
    MOVING = "moving"
    FROZEN = "staged"
    REFUSED = "refused"
    OVER = "dropped"


@dataclass(eq=False, slots=True)
class InStream:
    """One rank's stream on one lane; its epochs come and go, its chunks stay."""

    push: Push
    rank: int
    lane: int
    pieces: tuple[Range, ...]
    intake: Intake
    epoch: int
    stream: int
    peer: bytes

    @property
    def key(self) -> Key:
        return (self.push.push, self.rank)


@dataclass(eq=False, slots=True)
class Push:
    """One open push."""

    push: PushId
    places: dict[int, int]  # rank → its place in the line of all pushes
    targets: Arrays  # layer → its buffer; empty once nothing may be written
    codec: Codec
    total: int  # bytes that travel; until all ranks are here, as if they cut no block in two
    deadline_at: float
    moved_at: float  # when a byte last came, or when nothing was owed to us
    rate: Rate
    phase: Phase = Phase.GATHERING
    reason: str = ""
    copying: int = 0  # threads that may be writing into a target
    streams: dict[tuple[int, int], InStream] = field(default_factory=dict)  # (rank, lane)

    @property
    def live(self) -> bool:
        return self.phase in (Phase.GATHERING, Phase.MOVING)

    @property
    def here(self) -> int:
        return sum(s.intake.total - s.intake.left for s in self.streams.values())


@dataclass(frozen=True, slots=True)
class Claim:
    """A chunk that was asked for and came; its checksum is still to be believed."""

    stream: InStream
    chunk: Range
    header: Header
    body: Buffer


class Receiver:
    """All pushes of one slave, over all its lanes."""

    def __init__(self, lanes: int, chunk_bytes: int, pool: Transit, askers: int, stall_s: float) -> None:
        self._chunk_bytes = chunk_bytes
        self._pool = pool
        self._stall_s = stall_s
        self._turns: list[Turns[Key]] = [Turns(askers) for _ in range(lanes)]
        self._pushes: dict[PushId, Push] = {}
        self._streams: dict[tuple[int, bytes, int], InStream] = {}  # (lane, peer, stream id): present epochs only
        self._closed = Closed()
        self._changed = threading.Condition()
        self._starved: set[int] = set()  # lanes that want more than the pool had
        self._layout: Layout | None = None

    def use(self, layout: Layout) -> None:
        """Say which layers this slave holds."""
        self._layout = layout

    def open(
        self,
        push: PushId,
        order: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        now: float,
        codec: Codec = codecs.FP32,
    ) -> None:
        """Accept the HELLOs of a push; opening it again changes nothing. A lossy codec adds to what `buffers` hold."""
        layout = self._layout
        assert layout is not None, "use() comes before open()"
        sizes = {layer: array.size for layer, array in buffers.items()}
        assert sizes == layout.numel, f"buffers of {sizes} elements for layers of {layout.numel}"
        with self._changed:
            if push not in self._pushes:
                places = {rank: place for place, rank in enumerate(order)}
                total = sum(piece.nbytes for piece in codec.ranges(layout.whole()))
                self._pushes[push] = Push(push, places, buffers, codec, total, now + deadline_s, now, Rate(now))

    def reorder(self, push_id: PushId, places: tuple[int, ...]) -> None:
        """Put the ranks of a push at other places; who has a turn keeps it. Unknown or of another size: nothing."""
        with self._changed:
            push = self._pushes.get(push_id)
            if push is not None and sorted(push.places) == list(range(len(places))):
                push.places = dict(enumerate(places))
                self._line_up()

    def _line_up(self) -> None:
        for turns in self._turns:
            turns.line_up(lambda key: self._pushes[key[0]].places[key[1]])

    def hello(self, lane: int, peer: bytes, name: StreamName, pieces: tuple[Range, ...], now: float) -> list[Move]:
        """A rank says what it brings, for the first time or after its connection broke.

        Repetition: a HELLO at or below the stream's epoch is refused and changes nothing.
        """
        with self._changed:
            push = self._pushes.get(PushId(name.cluster, name.inc, name.seq))
            refusal = self._refusal(push, lane, name, pieces)
            if refusal is not None:
                return [error(lane, peer, name.id, *refusal)]
            assert push is not None
            pieces = push.codec.ranges(pieces)
            stream = self._admit(push, lane, peer, name, pieces, now)
            gathering = push.phase is Phase.GATHERING
            missing = sum(piece.nbytes for piece in pieces) if gathering else stream.intake.left
            welcome = streams.encode_welcome(Welcome(missing, self._chunk_bytes))
            moves: list[Move] = [Say(lane, peer, Kind.WELCOME, stream.stream, welcome)]
            if gathering and len(push.streams) == len(push.places) * len(self._turns):
                return moves + self._begin(push, now)
            if not gathering and stream.intake.complete:
                moves.append(_done(stream))
            return moves

    def _refusal(
        self, push: Push | None, lane: int, name: StreamName, pieces: tuple[Range, ...]
    ) -> tuple[str, str] | None:
        """Code and message if this HELLO may not join, else None."""
        if push is None:
            return self._closed.verdict(name)
        if push.phase is Phase.REFUSED:
            return "refused", f"push {push.push} was refused: {push.reason}"
        if name.rank not in push.places or name.lane != lane or name.version:
            return "invalid", f"push {push.push} has ranks {sorted(push.places)}, got {name} on lane {lane}"
        known = push.streams.get((name.rank, lane))
        if known is None:
            return None
        if name.epoch <= known.epoch:
            return "stale_push", f"epoch {name.epoch} of rank {name.rank} is over, {known.epoch} is the last"
        if pieces != known.pieces:
            return "invalid", f"rank {name.rank} names other ranges than before its connection broke"
        return None

    def _admit(
        self, push: Push, lane: int, peer: bytes, name: StreamName, pieces: tuple[Range, ...], now: float
    ) -> InStream:
        stream = push.streams.get((name.rank, lane))
        if stream is None:
            intake = Intake((), self._chunk_bytes, self._pool, now)  # its chunks are cut when all ranges are believed
            stream = InStream(push, name.rank, lane, pieces, intake, name.epoch, name.id, peer)
            push.streams[name.rank, lane] = stream
            push.moved_at = now
        else:
            del self._streams[lane, stream.peer, stream.stream]
            stream.epoch, stream.stream, stream.peer = name.epoch, name.id, peer
            stream.intake.lost()
        self._streams[lane, peer, name.id] = stream
        return stream

    def _begin(self, push: Push, now: float) -> list[Move]:
        """All ranks are here: refuse the push if they do not fit together, else line them up to be asked."""
        problems = self._problems(push)
        if problems:
            return self._refuse(push, "; ".join(problems), "ranges")
        push.phase = Phase.MOVING
        moves: list[Move] = []
        for rank in sorted(push.places, key=push.places.__getitem__):
            for lane, turns in enumerate(self._turns):
                stream = push.streams[rank, lane]
                stream.intake = Intake(stream.pieces, push.codec.chunk_bytes(self._chunk_bytes), self._pool, now)
                if stream.intake.complete:
                    moves.append(_done(stream))
                else:
                    turns.enter(stream.key)
                    moves.append(Wake(lane))
        push.total = sum(stream.intake.total for stream in push.streams.values())
        if len(self._pushes) > 1:
            self._line_up()
        return moves + self._freeze_if_whole(push)

    def _problems(self, push: Push) -> list[str]:
        assert self._layout is not None
        claims: dict[str, list[Range]] = {}
        for (rank, _), stream in sorted(push.streams.items()):
            outside = self._layout.outside(stream.pieces)
            if outside:
                return [f"rank {rank}: {outside}"]
            claims.setdefault(f"rank {rank}", []).extend(stream.pieces)
        return uncovered(self._layout, claims)

    def plan(self, lane: int, now: float) -> list[Move]:
        """The WANTs that this lane may send now."""
        with self._changed:
            turns, moves = self._turns[lane], list[Move]()
            for key in turns.rotate(
                drained=lambda key: self._at(key, lane).intake.in_flight == 0,
                slow=lambda key: self._slow(self._at(key, lane), now),
            ):
                stream = self._at(key, lane)
                for unit in stream.intake.ask(now, turns.left(key)):
                    turns.spend(key, sum(chunk.nbytes for chunk in unit))
                    moves.append(Say(lane, stream.peer, Kind.WANT, stream.stream, streams.encode_want(unit)))
            if self._pool.limit - self._pool.used < self._chunk_bytes:
                self._starved.add(lane)
            return moves

    def _at(self, key: Key, lane: int) -> InStream:
        push, rank = key
        return self._pushes[push].streams[rank, lane]

    def _slow(self, stream: InStream, now: float) -> bool:
        return stream.intake.in_flight > 0 and now - stream.intake.heard_at > SLOW_S

    def claim(self, lane: int, peer: bytes, header: Header, body: Buffer, now: float) -> Claim:
        """Take in a CHUNK that was asked for; raise BadFrame if it was not. `stage` must follow."""
        with self._changed:
            stream = self._streams.get((lane, peer, header.stream))
            if stream is None:
                raise BadFrame("stream", f"no stream {header.stream:016x} on this connection")
            if stream.push.phase is not Phase.MOVING:
                raise BadFrame("unasked", f"push {stream.push.push} is {stream.push.phase.value}")
            if header.dtype is not stream.push.codec.dtype:
                granted = stream.push.codec.name
                raise BadFrame("type", f"push {stream.push.push} is granted in {granted}, not {header.dtype.name}")
            chunk = stream.intake.claim(header, now)
            if chunk is None:
                raise BadFrame("unasked", f"{header} of push {stream.push.push} was not asked for")
            stream.push.moved_at = now
            return Claim(stream, chunk, header, body)

    def stage(self, claim: Claim) -> list[Move]:
        """Check a claimed chunk and copy it into its place; raise BadFrame, after undoing the claim, if it is wrong."""
        stream, push = claim.stream, claim.stream.push
        with self._changed:
            if not push.live:
                stream.intake.drop(claim.chunk)
                return []
            push.copying += 1
        wrong: BadFrame | None = None
        try:
            check_body(claim.header, claim.body)
            self._copy(claim)
        except BadFrame as refused:
            wrong = refused
        with self._changed:
            push.copying -= 1
            if not push.copying:
                self._changed.notify_all()
            if push.phase is not Phase.MOVING:
                stream.intake.drop(claim.chunk)
                return []
            if wrong is not None:
                stream.intake.wrong(claim.chunk)
                raise wrong
            stream.intake.here(claim.chunk)
            return self._after(stream)

    def _copy(self, claim: Claim) -> None:
        targets = claim.stream.push.targets
        if not targets:
            return  # dropped since the claim: nothing may be written, and `drop` may have returned
        assert self._layout is not None
        begin, end = self._layout.place(claim.chunk)
        claim.stream.push.codec.put(claim.body, targets[claim.chunk.layer][begin:end])

    def _after(self, stream: InStream) -> list[Move]:
        """What a chunk that came to its place makes possible."""
        if stream.intake.complete:
            self._turns[stream.lane].leave(stream.key)
            return [_done(stream), Wake(stream.lane), *self._freeze_if_whole(stream.push)]
        lanes, self._starved = self._starved, set()  # else a lane asks when it has read: nobody need wake it
        return [Wake(lane) for lane in sorted(lanes)]

    def _freeze_if_whole(self, push: Push) -> list[Move]:
        if push.phase is not Phase.MOVING or any(not s.intake.complete for s in push.streams.values()):
            return []
        push.phase = Phase.FROZEN
        push.targets = {}
        return [Staged(push.push, push.total)]

    def tick(self, now: float) -> list[Move]:
        """End what stalls or is past its deadline."""
        moves: list[Move] = []
        with self._changed:
            for push in list(self._pushes.values()):
                push.rate.saw(push.here, now)
                if now >= push.deadline_at and not push.live:
                    self._forget(push)
                elif now >= push.deadline_at:
                    moves += self._refuse(push, "it passed its deadline; " + self._missing(push), "refused")
                elif push.live and self._waits_for_us(push):
                    push.moved_at = now
                elif push.live and now - push.moved_at >= self._stall_s:
                    reason = f"no new bytes for {self._stall_s:g} s; {self._missing(push)}"
                    moves += self._refuse(push, reason, "refused")
        return moves

    def _waits_for_us(self, push: Push) -> bool:
        """Nothing is owed to us: each unfinished stream waits for its turn or for the pool."""
        return push.phase is Phase.MOVING and not any(s.intake.busy for s in push.streams.values())

    def _missing(self, push: Push) -> str:
        silent = sorted(set(push.places) - {rank for rank, _ in push.streams})
        if silent:
            return f"ranks {silent} never said HELLO"
        return ", ".join(
            f"rank {rank} brought {s.intake.total - s.intake.left} of {s.intake.total} bytes"
            for (rank, _), s in sorted(push.streams.items())
            if not s.intake.complete
        )

    def _refuse(self, push: Push, reason: str, code: str) -> list[Move]:
        text = f"push {push.push} is refused: {reason}"
        moves: list[Move] = [error(s.lane, s.peer, s.stream, code, text) for s in push.streams.values()]
        self._stop(push, Phase.REFUSED, reason)
        return [*moves, PushOver(push.push, reason)]

    def drop(self, push_id: PushId) -> None:
        """Forget a push; on return nobody writes into its buffers. Waits for a copy under way, a chunk's worth."""
        with self._changed:
            push = self._pushes.get(push_id)
            if push is None:
                return
            self._forget(push)

    def drop_all(self) -> None:
        """Forget every push: the slave lives another life."""
        with self._changed:
            for push in list(self._pushes.values()):
                self._forget(push)

    def _forget(self, push: Push) -> None:
        self._stop(push, Phase.OVER, push.reason)
        if self._pushes.pop(push.push, None) is not None:
            self._closed.add(push.push.cluster, push.push.inc, push.push.seq)

    def _stop(self, push: Push, phase: Phase, reason: str) -> None:
        """No more writes: give back what was asked, wait out copies under way."""
        push.phase, push.reason, push.targets = phase, reason, {}
        for stream in push.streams.values():
            stream.intake.lost()
            self._turns[stream.lane].leave(stream.key)
            self._streams.pop((stream.lane, stream.peer, stream.stream), None)
        while push.copying:
            self._changed.wait()

    def transfers(self) -> tuple[Transfer, ...]:
        """What is moving now."""
        with self._changed:
            return tuple(
                Transfer(p.push.cluster, p.push.inc, p.push.seq, True, p.here, p.total, p.rate.bytes_per_s)
                for p in self._pushes.values()
                if p.live
            )


def _done(stream: InStream) -> Say:
    return Say(stream.lane, stream.peer, Kind.DONE, stream.stream, streams.encode_done(stream.intake.total))
