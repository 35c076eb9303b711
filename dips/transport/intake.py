"""The chunks that one stream is to bring: each is missing → asked → claimed → here, and each byte is written once.

The same for both directions: a slave receives a push from a rank, a rank a pull from a slave. A chunk that was not
asked for is refused, so duplicates and foreign chunks change nothing; a wrong one is missing again; when the connection
breaks, asked chunks are missing again, and claimed ones are completed. Pure; the owner serialises the calls.

Chunks of ranges that are not ready at their sender are not asked for, and count as left.

Only whole chunks are seen to arrive, and a peer that owes one for `stall_s` counts as dead. So on a slow link smaller
chunks are asked for, and a single small one while the link's rate is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from dips.codecs import ITEM_BYTES
from dips.transport.credit import MOST_CHUNKS, Credit
from dips.transport.pool import Transit, pool_cost
from dips.wire.chunks import Range, split_chunks
from dips.wire.frame import Header

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

    @property
    def hungry(self) -> bool:
        """Whether chunks are missing, and less than half of the credit is in flight."""
        return (
            bool(self._missing) and 2 * self._asked_bytes <= self.credit.bytes and 2 * len(self._asked) <= MOST_CHUNKS
        )

    def ask_chunks(self, now: float, allowance: int) -> list[tuple[Range, ...]]:
        """Return the chunks to ask for now, as WANTs of at most UNIT_CHUNKS; none while more than half is in flight.

        allowance  bytes of the stream's turn; the last chunk may exceed it
        """
        if not self.hungry:
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
