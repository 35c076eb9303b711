"""The sender of pulls: admits ranks, sends the chunks they ask for, and releases a source nobody needs any more."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dips.codecs import ITEM_BYTES, Codec
from dips.errors import StaleVersion
from dips.ids import PullId, VersionId, reads_only
from dips.outer.updates import Update
from dips.protocol.heartbeats import Transfer
from dips.slave.ports import Arrays, ByCluster, Move, Released, Say, SourceMoved, Tombstones, error_message
from dips.transport.intake import MOST_BYTES, MOST_CHUNKS, Rate, Transit
from dips.wire.chunks import LayerLayout
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
    encode_welcome,
    hash_body,
    range_type,
)

# ---- checksums ------------------------------------------------------------------------------------------------------
# Checksums of a version's chunks, each computed once: several clusters pull a version, and a version never changes.
#
# A name v@r stands for the same bytes wherever they are (a bank, a snapshot file), so a checksum of one copy holds for
# the other, and bytes that were damaged meanwhile are rejected by their reader. Not used for bytes that may change: a
# push's source is hashed whenever it is sent. Any thread may call; two at once may compute the same number twice.


Place = tuple[int, int]  # rank and lane
KEPT = 1 << 15  # chunks, over all versions: 32 GiB of parameters in chunks of 1 MiB, some 10 MB of memory


class Checksums:
    """A bounded table; when it is full, the version that was asked for first is forgotten."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._versions: dict[VersionId, dict[Range, int]] = {}
        self._held = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._held

    def chunk_checksum(self, version: VersionId, chunk: Range, body: Buffer) -> int:
        """Return the checksum of a chunk with the bytes `body`. Cost: the first call reads them, without the GIL."""
        table = self._versions.get(version)
        known = table.get(chunk) if table is not None else None
        if known is not None:
            return known
        made = hash_body(body)
        with self._lock:
            self._keep_checksum(version, chunk, made)
        return made

    def _keep_checksum(self, version: VersionId, chunk: Range, made: int) -> None:
        while self._held >= self._kept:
            oldest = next(iter(self._versions))
            if oldest == version:
                return  # nothing is older: further chunks are hashed each time
            self._held -= len(self._versions.pop(oldest))
        table = self._versions.setdefault(version, {})
        self._held += chunk not in table
        table[chunk] = made

    def forget_all(self) -> None:
        """Forget all checksums, for a new incarnation of the slave."""
        with self._lock:
            self._versions.clear()
            self._held = 0


# ---- outgoing pull --------------------------------------------------------------------------------------------------
# The sender's state of one open pull: the bytes that it is served from, its streams, and chunks in flight.
#
# Pure bookkeeping under the sender's lock.


Bytes = npt.NDArray[np.uint8]


class Tracker(Protocol):
    """Whether libzmq still reads a body that it sends without a copy."""

    @property
    def done(self) -> bool: ...


@dataclass(eq=False, slots=True)
class PullSource:
    """The bytes that a pull is served from, and the number of their chunks not yet released by libzmq."""

    views: dict[int, Bytes]
    in_flight: int = 0


@dataclass(eq=False, slots=True)
class OutStream:
    """The stream of one rank on one lane, in its present epoch."""

    pull: OutgoingPull
    lane: int
    peer: bytes
    epoch: int
    stream: int
    named: int  # bytes of the ranges in its HELLO
    parked: deque[Range] = field(default_factory=deque)  # asked for, and waiting for room
    held: deque[tuple[Tracker, int, PullSource]] = field(default_factory=deque)  # libzmq may still read these
    queued: int = 0  # bytes asked for, not parked and not handed to libzmq
    jobs: int = 0  # chunks asked for, not parked and not handed to libzmq
    copied: int = 0  # bytes of chunks that are sent from copies, queued or held by libzmq
    over: bool = False  # DONE, superseded by a later epoch, or unreachable
    updates: tuple[Update, ...] = ()  # contents of each of its chunks; none: parameters
    led_to: tuple[VersionId | None, ...] = ()  # the versions of these updates; a lent one may be written again
    ranges: type[Range] = Range  # class of its chunks, whose `nbytes` are the bytes as encoded

    @property
    def reads(self) -> bool:
        """Whether it is of an export or a follower."""
        return reads_only(self.pull.pull.cluster)

    def unsent(self, more: Iterable[Range] = ()) -> tuple[int, int]:
        """Return (chunks, bytes) that are asked for, with `more`, and not sent: the rank counts each of them as in
        flight.
        """
        waiting = [chunk.nbytes for chunk in chain(self.parked, more)]
        return self.jobs + len(waiting), self.queued + sum(waiting)

    def has_room(self, nbytes: int) -> bool:
        """Whether libzmq may be given `nbytes` more: twice the credit, since it releases late what has arrived."""
        if self.jobs + len(self.held) >= 2 * MOST_CHUNKS:
            return False
        return self.queued + sum(n for _, n, _ in self.held) + nbytes <= 2 * MOST_BYTES

    def reap_sent(self) -> int:
        """Forget trackers that are done; return how many bytes they held."""
        freed = 0
        while self.held and self.held[0][0].done:
            _, nbytes, source = self.held.popleft()
            source.in_flight -= 1
            freed += nbytes
        return freed


@dataclass(eq=False, slots=True)
class OutgoingPull:
    """One open pull."""

    pull: PullId
    version: VersionId
    source: PullSource
    moved_at: float  # when a rank last asked, or libzmq released a chunk
    rate: Rate
    closed: str = ""  # the reason, once it is no longer served
    streams: list[OutStream] = field(default_factory=list)  # superseded ones too, while libzmq reads for them
    out: int = 0  # bytes that libzmq has sent
    chain: tuple[Update, ...] = ()  # the updates that led to the version, pinned as long as it is
    former: list[PullSource] = field(default_factory=list)  # earlier sources that still have chunks in flight
    latest: dict[Place, OutStream] = field(default_factory=dict)  # newest stream of each rank and lane

    def find_updates(self, held: str) -> tuple[tuple[Update, ...], tuple[VersionId | None, ...]]:
        """Return the updates from the version that a rank holds to the pull's, and the versions to which they lead; ()
        if they are not available, or no longer.
        """
        links = [(update.parent, update.version) for update in self.chain]
        begins, ends = [str(parent) for parent, _ in links], [version for _, version in links]
        if held not in begins or [str(version) for version in ends] != [*begins[1:], str(self.version)]:
            return (), ()
        first = begins.index(held)
        return self.chain[first:], tuple(ends[first:])

    @property
    def idle(self) -> bool:
        return not any(s.jobs or s.held for s in self.streams)

    @property
    def owed(self) -> bool:
        """Whether chunks were sent that a rank does not take; chunks not yet sent are not the rank's fault."""
        return not self.closed and any(s.held for s in self.streams)

    def refuse_hello(self, latest: OutStream | None, lane: int, name: StreamName) -> tuple[str, str] | None:
        """Return (code, message) if this HELLO may not join, else None; `latest` is the rank's newest stream."""
        if self.closed:
            return "stale_push", f"pull {self.pull} is over: {self.closed}"
        if name.version != str(self.version):
            return "stale_version", f"pull {self.pull} is open on {self.version}, got {name.version!r}"
        if name.lane != lane:
            return "invalid", f"{name} came on lane {lane}"
        if latest is not None and name.epoch <= latest.epoch:
            return "stale_push", f"epoch {name.epoch} of rank {name.rank} is over, {latest.epoch} is the last"
        return None


def cut_updates(layout: LayerLayout, updates: tuple[Update, ...], chunk: Range) -> bytes:
    """Return the body of a chunk: for each update the step sizes of the blocks that it touches, then its codes."""
    begin, end = layout.place_range(chunk)
    blocks, parts = layout.place_blocks(chunk), list[memoryview]()
    for update in updates:
        if update.steps:
            parts.append(update.steps[chunk.layer][blocks].view(np.uint8).data)
        parts.append(update.codes[chunk.layer][begin:end].view(np.uint8).data)
    return b"".join(parts)


# ---- sender ---------------------------------------------------------------------------------------------------------
# The sender of pulls: admits ranks, sends the chunks that they ask for, and releases a source when it is no longer
# read.
#
# A rank asks (WANT), a stage computes the checksum (or an earlier pull did: Checksums), the lane sends the bytes
# straight from the source. A source is released once: when the pull is closed or stalled, and no job and no tracker of
# libzmq holds a byte of it. A pull stalls while a rank does not take the chunks that it asked for; a pull that is not
# asked for chunks waits (the master closes one that leads nowhere). A source is never released at the moment of sending
# (docs/rationale.md#8). A source may be replaced by the same bytes elsewhere (a slow reader is moved to a file): each
# chunk in flight counts against the source that it was cut from. Updates, and all that
# is sealed, are sent from copies, of which a stream takes no more than it leaves: a slow one cannot take them all. No
# socket, no clock; the lock is not held during a checksum or a send.


MOST_STREAMS = 1 << 16  # of all open pulls, one for each rank and lane: about 30 MB
READERS_SHARE = 2  # of all copies half, for all who only read: some that die at once must hold back no cluster
MOST_JOBS = 4096  # chunks of one lane that are being hashed or wait for it; further ones are parked


@dataclass(eq=False, slots=True)
class ChunkSend:
    """One chunk that a rank asked for, watched by the lane (transport/lane.py, Sent)."""

    sender: Sender
    stream: OutStream
    chunk: Range
    source: PullSource
    body: Buffer  # for updates: empty before `make_body`

    def make_body(self) -> Buffer:
        """Return the bytes to send. Cost: copies a chunk of updates."""
        self.body = self.sender.make_body(self)
        return self.body

    def make_frame(self, run: int, guard: FrameGuard = CHECKSUMS) -> tuple[bytes, Buffer]:
        """Return both parts of the frame. Cost: reads the chunk, unless it bears a checksum and a pull of its version
        has asked for it before; a sealed one is copied.
        """
        layer, param, offset, _ = chunk = self.chunk
        header = Header(Kind.CHUNK, run, self.stream.stream, chunk.nbytes, 0, layer, param, offset, chunk.dtype)
        known = partial(self.sender.checksums.chunk_checksum, self.stream.pull.version, chunk)
        alone = self.stream.updates or self.stream.reads  # a file's bytes vouch for no others
        return guard.seal_frame(header, self.make_body(), hash_body if alone else known)

    def still_wanted(self) -> bool:
        return not self.stream.over  # as all are of a pull that is closed

    def on_sent(self, tracker: Tracker) -> None:
        self.sender.on_sent(self, tracker)

    def on_not_sent(self) -> None:
        self.sender.on_not_sent(self)


class Sender:
    """The sender of all pulls of one slave, over all its lanes."""

    def __init__(
        self,
        chunk_bytes: int,
        stall_s: float,
        clock: Callable[[], float],
        sealed: bool = False,
        copies: int = MOST_BYTES,
    ) -> None:
        """`sealed`: all chunks are sent from copies; `copies` is the most bytes of these at once, over all streams."""
        self._sealed, self._copies = sealed, Transit(copies)
        self._lent = 0  # bytes of these copies that are of pulls of who only reads
        self._chunk_bytes = chunk_bytes
        self._stall_s = stall_s
        self._clock = clock
        self._pulls: dict[PullId, OutgoingPull] = {}
        self._moving: dict[PullId, OutgoingPull] = {}  # with chunks in flight or an end to come: `tick` looks at them
        self._streams: dict[tuple[int, bytes, int], OutStream] = {}
        self._parked: dict[OutStream, None] = {}  # streams with parked chunks, in order
        self._jobs: Counter[int] = Counter()  # by lane: chunks asked for, not parked and not handed to libzmq
        self._places = 0  # ranks and lanes that have a newest stream, of all pulls together
        self._closed = Tombstones()
        self._lock = threading.Lock()
        self._layout: LayerLayout | None = None
        self.checksums = Checksums()
        self.bytes_out = 0
        self._sent_to = ByCluster()

    def sent_by_cluster(self) -> dict[str, int]:
        """Return the bytes handed to libzmq for each cluster."""
        with self._lock:
            return self._sent_to.snapshot()

    def set_layers(self, layout: LayerLayout) -> None:
        """Set the layers that this slave holds."""
        self._layout = layout

    def open_pull(
        self, pull: PullId, version: VersionId, source: Arrays, now: float, chain: tuple[Update, ...] = ()
    ) -> None:
        """Serve `source` until close or stall, however late its ranks come. Idempotent.

        chain  the updates that led to the version: a rank that holds the parent of one gets the updates from there
        """
        served = self._make_source(source)
        with self._lock:
            if pull not in self._pulls:
                self._pulls[pull] = OutgoingPull(pull, version, served, now, Rate(now), chain=chain)

    def move_pull(self, pull_id: PullId, source: Arrays) -> None:
        """Cut chunks from `source` from now on; `tick` returns SourceMoved when none of the former one is in flight."""
        served = self._make_source(source)
        with self._lock:
            pull = self._pulls.get(pull_id)
            if pull is not None and not pull.closed:
                pull.former.append(pull.source)
                pull.source = served
                self._moving[pull_id] = pull

    def _make_source(self, arrays: Arrays) -> PullSource:
        assert self._layout is not None, "set_layers() comes before open_pull()"
        sizes = {layer: array.size for layer, array in arrays.items()}
        assert sizes == self._layout.numel, f"source of {sizes} elements for layers of {self._layout.numel}"
        return PullSource({layer: array.view(np.uint8) for layer, array in arrays.items()})

    def on_hello(self, lane: int, peer: bytes, name: StreamName, pieces: tuple[Range, ...], now: float) -> list[Move]:
        """Register a rank's stream; a HELLO at or below the stream's epoch is refused and changes nothing."""
        pull_id = PullId(name.cluster, name.inc, name.seq)
        place = name.rank, lane
        with self._lock:
            refusal = self._refuse_hello(pull_id, place, name, pieces)
            if refusal is not None:
                return [error_message(lane, peer, name.stream_id, *refusal)]
            pull = self._pulls[pull_id]
            pull.moved_at = now
            if place in pull.latest:
                self._end_stream(pull.latest[place])
            else:
                self._places += 1
            updates, led_to = pull.find_updates(name.held)
            dtype = updates[0].codec.update_dtype if updates else Codec.FP32.dtype
            ranges = range_type(dtype, len(updates))
            named = sum(ranges(*piece).nbytes for piece in pieces)
            stream = OutStream(
                pull, lane, peer, name.epoch, name.stream_id, named, updates=updates, led_to=led_to, ranges=ranges
            )
            pull.streams.append(stream)
            self._streams[lane, peer, name.stream_id] = pull.latest[place] = stream
            body = encode_welcome(Welcome(named, self._chunk_bytes, dtype.number, len(updates)))
            return [Say(lane, peer, Kind.WELCOME, name.stream_id, body)]

    def _refuse_hello(
        self, pull_id: PullId, place: Place, name: StreamName, pieces: tuple[Range, ...]
    ) -> tuple[str, str] | None:
        pull = self._pulls.get(pull_id)
        if pull is None:
            return self._closed.explain_not_open(name)
        assert self._layout is not None
        known = pull.refuse_hello(pull.latest.get(place), place[1], name)
        if known is not None:
            return known
        if place not in pull.latest and self._places >= MOST_STREAMS:
            return "unknown", f"{MOST_STREAMS} streams of pulls are open, no more are kept: try again"
        wrong = self._layout.describe_misfit(pieces)
        return None if wrong is None else ("ranges", f"rank {name.rank}: {wrong}")

    def on_want(self, lane: int, peer: bytes, stream_id: int, chunks: tuple[Range, ...], now: float) -> list[ChunkSend]:
        """Process a WANT; raise BadFrame if the stream is unknown, the ranges are foreign or the credit is exceeded."""
        with self._lock:
            stream = self._streams.get((lane, peer, stream_id))
            if stream is None:
                raise BadFrame("stream", f"no stream {stream_id:016x} on this connection")
            assert self._layout is not None
            outside = self._layout.describe_outside(chunks) or self._too_long(chunks)
            if outside:
                raise BadFrame("range", f"pull {stream.pull.pull}: {outside}")
            self._reap_stream(stream, now)
            chunks = tuple(stream.ranges(*chunk) for chunk in chunks) if stream.updates else chunks
            asked, nbytes = stream.unsent(chunks)
            if asked > MOST_CHUNKS or nbytes > max(MOST_BYTES, self._chunk_bytes):
                raise BadFrame("credit", f"pull {stream.pull.pull}: {asked} chunks, {nbytes} bytes asked and not sent")
            stream.parked += chunks
            stream.pull.moved_at = now
            return self._unpark(stream)

    def due(self, lane: int, now: float) -> list[ChunkSend]:
        """Return chunks of this lane that were asked for before and for which there is room only now."""
        if not self._parked:
            return []
        with self._lock:
            jobs = list[ChunkSend]()
            for stream in [s for s in self._parked if s.lane == lane]:
                self._reap_stream(stream, now)
                jobs += self._unpark(stream)
            return jobs

    def _unpark(self, stream: OutStream) -> list[ChunkSend]:
        """Return the chunks to pass to libzmq now. A WANT is parked while libzmq holds too many chunks of the stream,
        even if some of these have arrived, and while the lane has MOST_JOBS of all streams.
        """
        jobs, source = list[ChunkSend](), stream.pull.source
        while stream.parked and self._jobs[stream.lane] < MOST_JOBS:
            nbytes = stream.parked[0].nbytes
            if not (stream.has_room(nbytes) and self._take_copy(stream, nbytes)):
                break
            chunk = stream.parked.popleft()
            stream.queued += chunk.nbytes
            stream.jobs += 1
            self._jobs[stream.lane] += 1
            source.in_flight += 1
            jobs.append(
                ChunkSend(self, stream, chunk, source, b"" if stream.updates else self._view_chunk(source, chunk))
            )
        if jobs:
            self._moving[stream.pull.pull] = stream.pull
        if stream.parked:
            self._parked[stream] = None
        else:
            self._parked.pop(stream, None)
        return jobs

    def _take_copy(self, stream: OutStream, nbytes: int) -> bool:
        """Take room for a copy, if the chunk needs one; a stream that has some takes at most half of what is left."""
        if not (self._sealed or stream.updates):
            return True
        left = self._copies.limit - self._copies.used_bytes
        if stream.reads:
            left = min(left, self._copies.limit // READERS_SHARE - self._lent)
        if stream.copied + nbytes > left or not self._copies.take_bytes(nbytes):
            return False
        self._lent += nbytes * stream.reads
        stream.copied += nbytes
        return True

    def _give_copies(self, stream: OutStream, nbytes: int) -> None:
        if stream.copied:
            stream.copied -= nbytes
            self._lent -= nbytes * stream.reads
            self._copies.give_back(nbytes)

    def _too_long(self, chunks: tuple[Range, ...]) -> str | None:
        longest = max((chunk.nbytes for chunk in chunks), default=0)
        return f"a chunk of {longest} bytes, at most {self._chunk_bytes}" if longest > self._chunk_bytes else None

    def _view_chunk(self, source: PullSource, chunk: Range) -> memoryview:
        assert self._layout is not None
        begin, end = self._layout.place_range(chunk)
        return source.views[chunk.layer][begin * ITEM_BYTES : end * ITEM_BYTES].data

    def make_body(self, job: ChunkSend) -> Buffer:
        """Return a chunk's body: updates are cut out and copied, parameters are sent from their place.

        Raises StaleVersion if updates that were only lent have been written again (outer/updates.py).
        """
        assert self._layout is not None
        stream = job.stream
        if not stream.updates:
            return job.body
        body = cut_updates(self._layout, stream.updates, job.chunk)
        if tuple(update.version for update in stream.updates) != stream.led_to:
            raise StaleVersion(f"pull {stream.pull.pull} is too slow: newer versions took the place of its updates")
        return body

    def on_overtaken(self, job: ChunkSend, text: str) -> Say:
        """Record that a chunk is to be had no more; return the message that tells the rank to pull anew."""
        self.on_not_sent(job)
        return error_message(job.stream.lane, job.stream.peer, job.stream.stream, "stale_version", text)

    def on_sent(self, job: ChunkSend, tracker: Tracker) -> None:
        """Record that the lane handed the chunk to libzmq, which reads it until the tracker is done."""
        with self._lock:
            self._unqueue_chunk(job)
            if not job.stream.pull.owed:
                job.stream.pull.moved_at = self._clock()  # from now on the rank owes progress
            job.stream.held.append((tracker, job.chunk.nbytes, job.source))
            self.bytes_out += job.chunk.nbytes
            self._sent_to.add_bytes(job.stream.pull.pull.cluster, job.chunk.nbytes)
            self._reap_stream(job.stream, self._clock())

    def on_not_sent(self, job: ChunkSend) -> None:
        """Record that the chunk will not be sent; if its pull is still served, its peer is unreachable."""
        with self._lock:
            self._unqueue_chunk(job)
            self._give_copies(job.stream, job.chunk.nbytes)
            job.source.in_flight -= 1
            self._end_stream(job.stream)

    def _unqueue_chunk(self, job: ChunkSend) -> None:
        job.stream.jobs -= 1
        self._jobs[job.stream.lane] -= 1
        job.stream.queued -= job.chunk.nbytes

    def _reap_stream(self, stream: OutStream, now: float) -> None:
        freed = stream.reap_sent()
        if freed:
            self._give_copies(stream, freed)
            stream.pull.out += freed
            stream.pull.moved_at = now

    def on_done(self, lane: int, peer: bytes, stream_id: int) -> None:
        """End a stream whose rank has all it wants; ignored if unknown, as an honest DONE may come after the close."""
        with self._lock:
            stream = self._streams.get((lane, peer, stream_id))
            if stream is None:
                return
            stream.pull.moved_at = self._clock()
            self._end_stream(stream)

    def _end_stream(self, stream: OutStream) -> None:
        stream.over = True
        self._moving[stream.pull.pull] = stream.pull
        self._parked.pop(stream, None)
        self._streams.pop((stream.lane, stream.peer, stream.stream), None)

    def close_pull(self, pull_id: PullId, reason: str) -> None:
        """Stop serving a pull; `tick` returns Released when its source is released."""
        with self._lock:
            pull = self._pulls.get(pull_id)
            if pull is not None:
                self._close_pull(pull, reason)

    def close_all(self, reason: str) -> None:
        """Stop serving all pulls: the slave has another incarnation, or ends."""
        self.checksums.forget_all()
        with self._lock:
            for pull in self._pulls.values():
                self._close_pull(pull, reason)

    def _close_pull(self, pull: OutgoingPull, reason: str) -> None:
        pull.closed = pull.closed or reason
        self._moving[pull.pull] = pull
        for stream in pull.streams:
            self._end_stream(stream)

    def list_sources(self) -> list[tuple[PullId, VersionId, list[PullSource]]]:
        """Return every pull that is not released, with its version and all sources that may still be read."""
        if not self._pulls:
            return []
        with self._lock:
            return [(p.pull, p.version, [p.source, *p.former]) for p in self._pulls.values()]

    def tick(self, now: float) -> list[Move]:
        """Close pulls that stall; release sources that are no longer read."""
        moves: list[Move] = []
        with self._lock:
            for pull in list(self._moving.values()):
                for stream in pull.streams:
                    self._reap_stream(stream, now)
                pull.rate.record_bytes(pull.out, now)
                pull.streams = [s for s in pull.streams if not s.over or s.jobs or s.held]
                if pull.owed and now - pull.moved_at >= self._stall_s:
                    self._close_pull(pull, f"nothing moved for {self._stall_s:g} s")
                if pull.closed and pull.idle:
                    moves.append(self._release_pull(pull))
                elif pull.former and not any(source.in_flight for source in pull.former):
                    pull.former.clear()
                    moves.append(SourceMoved(pull.pull))
                if pull.idle and not (pull.closed or pull.former):
                    del self._moving[pull.pull]
        return moves

    def _release_pull(self, pull: OutgoingPull) -> Released:
        del self._pulls[pull.pull], self._moving[pull.pull]
        self._closed.close(pull.pull)
        self._places -= len(pull.latest)
        return Released(pull.pull, pull.closed)

    @property
    def holds_sources(self) -> bool:
        """Whether some source is not released."""
        return bool(self._pulls)

    def list_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that move now."""
        now = self._clock()
        with self._lock:
            return tuple(self._describe_pull(pull, now) for pull in self._pulls.values() if not pull.closed)

    def _describe_pull(self, pull: OutgoingPull, now: float) -> Transfer:
        pull.rate.record_bytes(pull.out, now)  # of a pull that waits `tick` records nothing
        named = sum(stream.named for stream in pull.latest.values())
        cluster, inc, seq = pull.pull.cluster, pull.pull.inc, pull.pull.seq
        return Transfer(cluster, inc, seq, push=False, nbytes=pull.out, total=named, bytes_per_s=pull.rate.bytes_per_s)
