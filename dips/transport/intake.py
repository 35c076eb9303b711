"""The chunks that streams are asked for: how many bytes of each stream, in all, in what turn, and which are here."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dips.codecs import ITEM_BYTES
from dips.wire.chunks import split_chunks
from dips.wire.frame import Header, Range

# ---- rate -----------------------------------------------------------------------------------------------------------


STEP_S = 0.2  # least time between two samples
HORIZON_S = 5.0  # length of the window


class Rate:
    """The rate of one transfer, from samples of its byte count."""

    def __init__(self, now: float, nbytes: int = 0) -> None:
        self._samples: deque[tuple[float, int]] = deque([(now, nbytes)])

    def record_bytes(self, nbytes: int, now: float) -> None:
        """Record the total so far. Samples closer than STEP_S replace the previous one."""
        if len(self._samples) > 1 and now - self._samples[-2][0] < STEP_S:
            self._samples.pop()
        self._samples.append((now, nbytes))
        while now - self._samples[1][0] >= HORIZON_S:  # the last is of now
            self._samples.popleft()

    @property
    def bytes_per_s(self) -> float:
        """Mean over the samples of the last HORIZON_S; 0 before the second."""
        (began, first), (ended, last) = self._samples[0], self._samples[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


# ---- credit ---------------------------------------------------------------------------------------------------------
# The bytes that one stream may have in flight: 2 × bandwidth × round trip, in [4, 64] MiB (docs/protocol.md#sockets).
#
# Pure: `now` is an argument. The round trip is measured from a WANT that left when nothing was in flight to its first
# chunk; the bandwidth is the best of the last spans, so that one pause of either end does not shrink the credit. While
# the credit is the limit, the measured bandwidth is at least credit / round trip, so the credit doubles until the link
# is the limit.


LEAST_BYTES = 4 << 20
FIRST_BYTES = 16 << 20  # before anything is measured: what a busy core needs to keep a fast link full
MOST_BYTES = 64 << 20
MOST_CHUNKS = 128  # in flight on one stream; RCVHWM is above it
SLICE_S = 0.01  # delay until a busy core reads a socket: a shorter round trip counts as this
SPAN_S = 0.01  # least length of the spans over which bandwidth is measured
SPANS = 8  # last spans, of which the best counts


class Credit:
    """The credit of one stream, from its measured round trip and bandwidth."""

    def __init__(self) -> None:
        self.bytes = FIRST_BYTES
        self._rtt = float("inf")  # smallest measured, s
        self._asked_at: float | None = None  # time of a WANT sent when nothing was in flight
        self._span_at: float | None = None
        self._span_bytes = 0
        self._rates: deque[float] = deque(maxlen=SPANS)  # bytes/s of the last spans

    @property
    def bytes_per_s(self) -> float:
        """Largest bandwidth of the last spans; 0 before the first span is over."""
        return max(self._rates, default=0.0)

    @property
    def latest_bytes_per_s(self) -> float:
        """Bandwidth of the last span; 0 before the first is over."""
        return self._rates[-1] if self._rates else 0.0

    def on_want(self, now: float, idle: bool) -> None:
        """Record that a WANT leaves; `idle` if nothing was in flight."""
        if idle:
            self._asked_at, self._span_at, self._span_bytes = now, now, 0

    def on_chunk(self, nbytes: int, now: float) -> None:
        """Record that a chunk came, and update the credit at the end of a span."""
        if self._asked_at is not None:
            self._rtt = min(self._rtt, max(now - self._asked_at, 1e-6))
            self._asked_at = None
        if self._span_at is None:
            return
        self._span_bytes += nbytes
        span = now - self._span_at
        if span >= max(SPAN_S, self._rtt):
            self._rates.append(self._span_bytes / span)
            wanted = int(2 * max(self._rtt, SLICE_S) * self.bytes_per_s)
            self.bytes = min(max(wanted, LEAST_BYTES), MOST_BYTES)
            self._span_at, self._span_bytes = now, 0


# ---- pool -----------------------------------------------------------------------------------------------------------
# The limit of bytes in transit: asked for and not yet in their place, over all streams; a part of the memory sum at
# start.


FLOOR_BYTES = 4096  # least cost of a chunk: limits the number of frames, and so every queue


def pool_cost(nbytes: int) -> int:
    """Return the pool's cost of a chunk of `nbytes`."""
    return max(nbytes, FLOOR_BYTES)


class Transit:
    """A counter with a limit, shared by all lanes; every `take_bytes` that succeeds must be followed by one
    `give_back`.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= FLOOR_BYTES
        self.limit = limit
        self._used = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used

    @property
    def most_chunks(self) -> int:
        """The most chunks that can be in transit: the depth of a queue that never overflows."""
        return self.limit // FLOOR_BYTES

    def take_bytes(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return False if that would exceed the limit."""
        with self._lock:
            if self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Release reserved bytes."""
        with self._lock:
            self._used -= nbytes
            assert self._used >= 0, "more was given back than taken"


# ---- turns ----------------------------------------------------------------------------------------------------------
# Turns of a lane's streams to be asked: deficit round robin in bytes.
#
# At most `concurrent_streams` are asked at once, and `most_each` of one sender, whose streams share its link: a few
# fill it, and a sender with many does not keep the others waiting. A turn lasts `quantum` bytes, and goes on while no
# stream waits that could take it over, so the link is never idle for the sake of fairness. Bytes beyond a turn are
# deducted from the next. A slow stream loses its turn and does not delay the others: an order of asking, never a
# barrier (docs/rationale.md#5). Pure.


CONCURRENT_STREAMS = 64  # at once on a lane, of all clusters
MOST_EACH = 4  # of one cluster: a single one would wait a round trip for each piece
QUANTUM_BYTES = 16 << 20  # a few credits: with less, the link would run empty at each change of turn

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """The order of asking of one lane."""

    def __init__(
        self,
        concurrent_streams: int,
        quantum: int = QUANTUM_BYTES,
        *,
        sender_of: Callable[[K], Hashable] = lambda key: key,
        most_each: int = 1,
    ) -> None:
        """`sender_of` gives the sender of a stream; by default each stream has its own."""
        assert min(concurrent_streams, quantum, most_each) >= 1
        self._concurrent_streams, self._most_each = concurrent_streams, most_each
        self._sender_of = sender_of
        self._quantum = quantum
        self._active: dict[K, int] = {}  # stream → bytes that may still be asked for in this turn
        self._waiting: deque[K] = deque()
        self._waits: Counter[Hashable] = Counter()  # waiting streams by sender
        self._debt: dict[K, int] = {}
        self._may_begin = False  # whether a waiting stream may have a turn since the last look

    def enter_line(self, key: K) -> None:
        """Append to the end of the line. Idempotent."""
        if key not in self._active and key not in self._waiting:
            self._wait(key)

    def leave_line(self, key: K) -> None:
        """Remove from the line and end the turn. Idempotent."""
        self._debt.pop(key, None)
        if self._active.pop(key, None) is not None:
            self._may_begin = True
        elif key in self._waiting:
            self._waiting.remove(key)
            self._end_wait(self._sender_of(key))

    def line_up(self, place: Callable[[K], int]) -> None:
        """Sort the waiting ones by their places, once; present turns go on."""
        self._waiting = deque(sorted(self._waiting, key=place))

    def rotate_turns(self, drained: Callable[[K], bool], slow: Callable[[K], bool]) -> tuple[K, ...]:
        """End turns that are over, begin possible ones, and return the streams that may be asked, oldest turn first.

        drained  whether a stream has no chunks in flight: only then does its used-up turn end, so that at most
                 `concurrent_streams` are busy
        slow     whether a stream owes chunks and sends none: it loses its turn to a waiting stream
        """
        for key, left in list(self._active.items()):
            if not self._is_contested(key):
                if left <= 0:
                    self._active[key] = left + self._quantum
            elif slow(key) or (left <= 0 and drained(key)):
                del self._active[key]
                self._debt[key] = min(left, 0)
                self._wait(key)
        if self._may_begin:
            self._begin_turns()
        return tuple(self._active)

    def _wait(self, key: K) -> None:
        self._waiting.append(key)
        self._waits[self._sender_of(key)] += 1
        self._may_begin = True

    def _end_wait(self, sender: Hashable) -> None:
        self._waits[sender] -= 1
        if not self._waits[sender]:
            del self._waits[sender]

    def _is_contested(self, key: K) -> bool:
        """Whether a waiting stream could take over the turn of `key`: any if all turns are taken, else its sender's."""
        if len(self._active) >= self._concurrent_streams:
            return bool(self._waiting)
        return self._waits[self._sender_of(key)] > 0

    def _begin_turns(self) -> None:
        """Give turns to waiting streams, first come first served, as far as the limits allow."""
        taken, kept = Counter(map(self._sender_of, self._active)), deque[K]()
        while self._waiting and len(self._active) < self._concurrent_streams:
            key = self._waiting.popleft()
            sender = self._sender_of(key)
            if taken[sender] >= self._most_each:
                kept.append(key)
                continue
            taken[sender] += 1
            self._end_wait(sender)
            self._active[key] = self._quantum + self._debt.pop(key, 0)
        self._waiting = kept + self._waiting
        self._may_begin = False

    @property
    def empty(self) -> bool:
        """Whether no stream has a turn and none waits."""
        return not self._active and not self._waiting

    def bytes_left(self, key: K) -> int:
        """Return the bytes that `key` may still be asked for in its turn; 0 or less if none, or if it has no turn."""
        return self._active.get(key, 0)

    def spend_bytes(self, key: K, nbytes: int) -> None:
        """Deduct `nbytes` from the turn of `key`."""
        self._active[key] -= nbytes


# ---- intake ---------------------------------------------------------------------------------------------------------
# The chunks that one stream is to bring: each is missing → asked → claimed → here, and each byte is written once.
#
# The same for both directions: a slave receives a push from a rank, a rank a pull from a slave. A chunk that was not
# asked for is refused, so duplicates and foreign chunks change nothing; a wrong one is missing again; when the
# connection breaks, asked chunks are missing again, and claimed ones are completed. Pure; the owner serialises the
# calls.
#
# Chunks of ranges that are not ready at their sender are not asked for, and count as left.
#
# Only whole chunks are seen to arrive, and a peer that owes one for `stall_s` counts as dead. So on a slow link smaller
# chunks are asked for, and a single small one while the link's rate is unknown.


UNIT_CHUNKS = 8  # of one WANT
CHUNK_S = 2.0  # longest duration of a chunk at the stream's present rate, far below any stall_s
LEAST_CHUNK_BYTES = 64 << 10  # of fp32, on the slowest link: at 2 kB/s they take 30 s


@dataclass(slots=True)
class LinkRate:
    """The last measured rate of a link's streams, with which the next stream begins."""

    bytes_per_s: float = 0.0  # 0: unknown


class Intake:
    """The chunks of one stream; it survives the stream's connections."""

    def __init__(
        self,
        pieces: Iterable[Range],
        chunk_bytes: int,
        pool: Transit,
        now: float,
        link: LinkRate | None = None,
        ready: int | None = None,
    ) -> None:
        """`ready` is the number of `pieces` that may be asked for, the others after `release_pieces`; None: all."""
        given = list(pieces)
        self._ready = len(given) if ready is None else ready
        self._withheld = deque(list(split_chunks([piece], chunk_bytes)) for piece in given[self._ready :])
        self._missing = deque(split_chunks(given[: self._ready], chunk_bytes))
        self._asked: dict[tuple[int, int, int], Range] = {}
        self._asked_bytes = 0
        self._claimed = 0  # chunks being verified and copied
        self._pool = pool
        self.credit = Credit()
        # Bytes that are not here:
        self.left = sum(chunk.nbytes for chunks in (self._missing, *self._withheld) for chunk in chunks)
        self.total = self.left
        self.last_byte_at = now  # time of the last byte, or of the first WANT after silence
        self._link = link or LinkRate()
        self._rate = 0.0  # of this stream, or of another one over its link; 0 while unknown

    @property
    def complete(self) -> bool:
        return self.left == 0

    @property
    def in_flight(self) -> int:
        """Bytes that were asked for and have not come yet."""
        return self._asked_bytes

    @property
    def busy(self) -> bool:
        """Whether some chunk was asked for and is not in its place yet."""
        return bool(self._asked) or self._claimed > 0

    @property
    def idle(self) -> bool:
        """Whether nothing may be asked for and nothing is in flight: it is complete, or the rest is not ready."""
        return not self._missing and not self.busy

    def release_pieces(self, ready: int) -> None:
        """Allow to ask for the first `ready` pieces; a number that is not above the last changes nothing."""
        while self._ready < ready and self._withheld:
            self._missing.extend(self._withheld.popleft())
            self._ready += 1

    def ask_chunks(self, now: float, allowance: int) -> list[tuple[Range, ...]]:
        """Return the chunks to ask for now, as WANTs of at most UNIT_CHUNKS; none while more than half is in flight.

        allowance  bytes of the stream's turn; the last chunk may exceed it
        """
        if 2 * self._asked_bytes > self.credit.bytes or 2 * len(self._asked) > MOST_CHUNKS:
            return []
        self._rate = self._rate or self._link.bytes_per_s
        idle = not self._asked
        chunks = self._take_missing(allowance)
        if chunks and idle:
            self.last_byte_at = now
        self.credit.on_want(now, idle and bool(chunks))
        return [tuple(chunks[i : i + UNIT_CHUNKS]) for i in range(0, len(chunks), UNIT_CHUNKS)]

    def _take_missing(self, allowance: int) -> list[Range]:
        chunks: list[Range] = []
        while self._missing and allowance > 0 and len(self._asked) < MOST_CHUNKS:
            chunk = self._next_chunk()
            trial = not self._rate and chunk.length < self._missing[0].length
            if self._asked and (trial or self._asked_bytes + chunk.nbytes > self.credit.bytes):
                break
            if not self._pool.take_bytes(pool_cost(chunk.nbytes)):
                break
            self._remove_missing(chunk)
            self._asked[chunk[:3]] = chunk
            self._asked_bytes += chunk.nbytes
            allowance -= chunk.nbytes
            chunks.append(chunk)
        return chunks

    def _next_chunk(self) -> Range:
        """Return the first missing chunk, or as much of its beginning as takes CHUNK_S. Blocks are never cut."""
        most = max(1, int(self._rate * CHUNK_S) // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES // ITEM_BYTES
        return self._missing[0].cut(most)

    def _remove_missing(self, chunk: Range) -> None:
        layer, param, offset, length = self._missing.popleft()
        if rest := length - chunk.length:
            self._missing.appendleft(type(chunk)(layer, param, offset + chunk.length, rest))

    def claim_chunk(self, header: Header, now: float) -> Range | None:
        """asked → claimed, if exactly this chunk was asked for; else None.

        `mark_received`, `mark_wrong` or `drop_claim` must follow.
        """
        key = (header.layer, header.param, header.offset)
        chunk = self._asked.get(key)
        if chunk is None or (chunk.nbytes, chunk.dtype) != (header.length, header.dtype):
            return None
        del self._asked[key]
        self._asked_bytes -= chunk.nbytes
        self._claimed += 1
        self._measure_rate(chunk, now)
        self.last_byte_at = now
        return chunk

    def _measure_rate(self, chunk: Range, now: float) -> None:
        self.credit.on_chunk(chunk.nbytes, now)
        if not self._rate and chunk.length * ITEM_BYTES >= LEAST_CHUNK_BYTES:
            self._rate = chunk.nbytes / max(now - self.last_byte_at, 1e-6)  # at least: the round trip is in it
            self.credit = Credit()  # a single chunk does not show how many the link can hold
        self._rate = self.credit.latest_bytes_per_s or self._rate
        self._link.bytes_per_s = self._rate

    def mark_received(self, chunk: Range) -> None:
        """claimed → here: the chunk is in its place."""
        self.drop_claim(chunk)
        self.left -= chunk.nbytes

    def mark_wrong(self, chunk: Range) -> None:
        """claimed → missing: its bytes are not those that its sender hashed."""
        self.drop_claim(chunk)
        self._missing.appendleft(chunk)

    def drop_claim(self, chunk: Range) -> None:
        """claimed → nothing: the transfer is over."""
        assert self._claimed > 0
        self._claimed -= 1
        self._pool.give_back(pool_cost(chunk.nbytes))

    def on_connection_lost(self) -> None:
        """asked → missing: the connection is gone, or the transfer is over."""
        for chunk in reversed(self._asked.values()):
            self._pool.give_back(pool_cost(chunk.nbytes))
            self._missing.appendleft(chunk)
        if self._asked:
            self.credit, self._rate, self._link = Credit(), 0.0, LinkRate()  # other streams may be faster
        self._asked.clear()
        self._asked_bytes = 0
