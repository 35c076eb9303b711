"""What one stream is to bring: every chunk is missing → asked → claimed → here, and each byte is written once.

The same for both directions: a slave takes a push in from a rank, a rank takes a pull in from a slave. A chunk that is
not asked for is refused, so duplicates and strangers change nothing; a wrong one is missing again; when the connection
breaks, what was asked is missing again, and what is claimed goes on. Pure; the owner serialises the calls.

Chunks of ranges that are not ready at their sender are not asked for, and count as left.

Only whole chunks are seen to arrive: who owes one for `stall_s` is taken for dead. So where a link is slow, chunks are
asked for in smaller pieces, and one small piece alone while nobody knows how fast it is.
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

UNIT_CHUNKS = 8  # in one WANT
CHUNK_S = 2.0  # that a chunk may take by the stream's present rate, far below any stall_s
LEAST_CHUNK_BYTES = 64 << 10  # of fp32, on the slowest link: 2 kB/s bring it within 30 s


@dataclass(slots=True)
class LinkRate:
    """What a stream over one link has last seen, for the next one: it need not try again how fast the link is."""

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
        """`ready`: so many of `pieces` may be asked for, the others after `release_pieces`; None: all."""
        given = list(pieces)
        self._ready = len(given) if ready is None else ready
        self._withheld = deque(list(split_chunks([piece], chunk_bytes)) for piece in given[self._ready :])
        self._missing = deque(split_chunks(given[: self._ready], chunk_bytes))
        self._asked: dict[tuple[int, int, int], Range] = {}
        self._asked_bytes = 0
        self._claimed = 0  # chunks being checked and copied
        self._pool = pool
        self.credit = Credit()
        # Bytes not here:
        self.left = sum(chunk.nbytes for chunks in (self._missing, *self._withheld) for chunk in chunks)
        self.total = self.left
        self.last_byte_at = now  # the last byte, or the first WANT after silence
        self._link = link or LinkRate()
        self._rate = 0.0  # of this stream, or of another one over its link; 0 while unknown

    @property
    def complete(self) -> bool:
        return self.left == 0

    @property
    def in_flight(self) -> int:
        """Bytes that were asked and did not come yet."""
        return self._asked_bytes

    @property
    def busy(self) -> bool:
        """Something was asked and is not in its place yet."""
        return bool(self._asked) or self._claimed > 0

    @property
    def idle(self) -> bool:
        """Nothing may be asked, and nothing is under way: it is complete, or the rest is not ready."""
        return not self._missing and not self.busy

    def release_pieces(self, ready: int) -> None:
        """The first `ready` pieces may be asked for; a number that is not above the last changes nothing."""
        while self._ready < ready and self._withheld:
            self._missing.extend(self._withheld.popleft())
            self._ready += 1

    @property
    def hungry(self) -> bool:
        """Something is missing, and less than half of what may be in flight is."""
        return (
            bool(self._missing) and 2 * self._asked_bytes <= self.credit.bytes and 2 * len(self._asked) <= MOST_CHUNKS
        )

    def ask_chunks(self, now: float, allowance: int) -> list[tuple[Range, ...]]:
        """Take what may be asked now, as WANTs of at most UNIT_CHUNKS; nothing while more than half is in flight.

        allowance  bytes of the stream's turn; the last chunk may pass it
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
        """The first missing chunk, or as much of its beginning as comes in time. Whole blocks: they are never cut."""
        most = max(1, int(self._rate * CHUNK_S) // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES // ITEM_BYTES
        return self._missing[0].cut(most)

    def _remove_missing(self, chunk: Range) -> None:
        layer, param, offset, length = self._missing.popleft()
        if rest := length - chunk.length:
            self._missing.appendleft(type(chunk)(layer, param, offset + chunk.length, rest))

    def claim_chunk(self, header: Header, now: float) -> Range | None:
        """asked → claimed, if this very chunk was asked; else None.

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
            self.credit = Credit()  # one chunk alone says nothing of how many the link can hold
        self._rate = self.credit.latest_bytes_per_s or self._rate
        self._link.bytes_per_s = self._rate

    def mark_received(self, chunk: Range) -> None:
        """claimed → here: it is in its place."""
        self.drop_claim(chunk)
        self.left -= chunk.nbytes

    def mark_wrong(self, chunk: Range) -> None:
        """claimed → missing: its bytes were not what its sender saw."""
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
            self.credit, self._rate, self._link = Credit(), 0.0, LinkRate()  # others' streams may fare better
        self._asked.clear()
        self._asked_bytes = 0
