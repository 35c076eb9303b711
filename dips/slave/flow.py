"""The data flow of one slave over ZeroMQ: lanes that read, stages that check and copy, the receiver and the sender."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Concatenate, ParamSpec

import structlog
import zmq

from dips.codecs import Codec
from dips.config import host_port
from dips.errors import StaleVersion
from dips.ids import PullId, PushId, VersionId
from dips.outer.updates import Update
from dips.protocol.heartbeats import Transfer
from dips.protocol.manifest import Manifest
from dips.slave.admission import Admission, Keyring
from dips.slave.ports import Arrays, FlowEvent, FrameCounters, FrameRefused, Move, PushOver, Released, Say, Wake
from dips.slave.receiver import ClaimedChunk, Receiver
from dips.slave.sender import MOST_JOBS, ChunkSend, Sender
from dips.telemetry.logs import Log
from dips.transport.intake import MOST_BYTES, Transit
from dips.transport.lane import (
    Lane,
    LanePort,
    MakeLane,
    Outgoing,
    Stage,
    available_cores,
    most_connections,
    spare_threads,
)
from dips.transport.seal import KEY_CHARS, KeyPair
from dips.wire.chunks import LayerLayout
from dips.wire.frame import (
    MESSAGE_LIMIT,
    BadFrame,
    Buffer,
    Header,
    Kind,
    check_body,
    decode_done,
    decode_hello,
    decode_probe,
    decode_ready,
    decode_want,
    is_greeting,
    make_message,
    run_id,
    unpack_header,
)

# ---- probes ---------------------------------------------------------------------------------------------------------
# A lane's answers to PROBEs, with which `dips check` measures the path to a slave before it joins.
#
# A probe touches no push, pull or version. All answers share one buffer, or are sealed copies of it. Few are sent at a
# time, so that probes use a known amount of memory and alternate with transfers; further ones are refused. Owned by
# one lane's thread.


MOST_ANSWERS = 32  # of one lane, not yet handed to the network: at most 32 MiB in flight

_PADDING = memoryview(os.urandom(MESSAGE_LIMIT))  # random, so that links that compress do not look faster


class Probes:
    """Makes a lane's answers to probes and counts those that are not sent yet (`lane.Sent`)."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._posted = 0  # answers that the lane has not sent yet
        self._leaving: list[zmq.MessageTracker] = []

    def make_answer(self, peer: bytes, stream: int, nbytes: int) -> Outgoing:
        """Return the answer of `nbytes` bytes; raise BadFrame if too many are being sent."""
        self._leaving = [tracker for tracker in self._leaving if not tracker.done]
        if self._posted + len(self._leaving) >= MOST_ANSWERS:
            raise BadFrame("credit", f"more than {MOST_ANSWERS} probes are being answered")
        self._posted += 1
        return Outgoing(peer, Header(Kind.PROBE, self._run, stream, nbytes, 0), _PADDING[:nbytes], watch=self)

    def still_wanted(self) -> bool:
        return True

    def on_sent(self, tracker: zmq.MessageTracker) -> None:
        self._posted -= 1
        self._leaving.append(tracker)

    def on_not_sent(self) -> None:
        self._posted -= 1


# ---- flow -----------------------------------------------------------------------------------------------------------
# The data flow of one slave over ZeroMQ: lanes that read, stages that check and copy, and the receiver and sender that
# decide.
#
#     lane thread   recv → header → receiver.claim ──▶ intake stage: check, copy into the slot → receiver.stage
#                                 → sender.want     ──▶ outgo stage:  checksum → the lane sends from the source
#
# On encrypted lanes the check and the copy are one, and the outgo stage seals into a buffer that the lane sends.
#
# A bad frame is counted in `refused_frames` under its reason and changes nothing else; it never ends a lane.


TICK_S = 0.05  # interval at which each lane looks for pulls that libzmq has sent
LOOK_S = 0.2  # interval at which open pushes are sampled, and ended if they stall

P = ParamSpec("P")


def _catch_bad_frames(work: Callable[Concatenate[ZmqFlow, P], None]) -> Callable[Concatenate[ZmqFlow, P], None]:
    """Count bad frames, and log any other exception, so that the thread goes on for the other pushes and pulls."""

    @wraps(work)
    def catch_bad_frame(flow: ZmqFlow, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            work(flow, *args, **kwargs)
        except BadFrame as bad:
            flow._count_refused(bad)
        except Exception:  # noqa: BLE001  a lane that dies of one push's bug takes every cluster with it
            flow._counters.add_refused("failed")
            flow._log.exception("flow_failed", slave=flow._slave, where=work.__name__)

    return catch_bad_frame


class ZmqFlow:
    """Implements ports.Flow. Bound when it is made, started anew for each incarnation, closed once."""

    def __init__(
        self,
        run: str,
        slave: str,
        lanes: tuple[str, ...],
        chunk_bytes: int,
        transit_bytes: int,
        concurrent_streams: int,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
        key: KeyPair | None = None,
        copies_bytes: int = MOST_BYTES,
        log: Log | None = None,
        make_lane: MakeLane = Lane,
        in_place: bool = False,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """Bind every lane (`host:port`, port 0 takes a free one); ConfigError names one that cannot be bound.

        copies_bytes  most bytes of chunks that are sent from copies: sealed, or of updates
        key           of all lanes, which are encrypted and admit ranks of open transfers; None: they are open to all
        in_place      chunks are checked, copied and hashed on their lane's thread, without stages beside it
        pause         sleeps for so many seconds, while `close` waits for libzmq
        """
        self.public_key = "" if key is None else key.public
        self._log: Log = log or structlog.get_logger(__name__)
        self._in_place = in_place
        self._run, self._slave = run_id(run), slave
        self._chunk_bytes = chunk_bytes
        self._clock, self._pause = clock, pause
        self._pool = Transit(transit_bytes)
        self._receiver = Receiver(len(lanes), chunk_bytes, self._pool, concurrent_streams, stall_s)
        self._sender = Sender(chunk_bytes, stall_s, clock, key is not None, copies_bytes)
        self._keyring = None if key is None else Keyring()
        self._admission = Admission(run, slave, self._receiver, self._sender, self._keyring)
        self._on_event: Callable[[FlowEvent], None] | None = None
        self._ticked_at = [0.0] * len(lanes)
        self._looked_at = 0.0
        self._counters = FrameCounters()
        self._lanes: list[LanePort] = []
        self._intake: list[Stage[ClaimedChunk]] = []
        self._outgo: list[Stage[ChunkSend]] = []
        self._started = self._over = False
        self._probes: list[Probes] = [Probes(self._run) for _ in lanes]
        try:
            most = most_connections(len(lanes))
            for index, address in enumerate(lanes):
                host, port = host_port(address)
                self._lanes.append(make_lane(index, host, port, stall_s, key, self._admit_key, most))
        except BaseException:
            self.close()
            raise

    @property
    def refused_frames(self) -> Counter[str]:
        """Refused frames by reason (wire.frame.REASONS)."""
        return self._counters.refused_by_reason()

    @property
    def bytes_in(self) -> int:
        """Bytes staged since the start of the process."""
        return self._counters.bytes_in

    @property
    def bytes_out(self) -> int:
        """Bytes of chunks handed to libzmq since the start of the process."""
        return self._sender.bytes_out

    @property
    def transit_bytes(self) -> tuple[int, int]:
        """Bytes asked for and not yet in place, and their limit."""
        return self._pool.used_bytes, self._pool.limit

    def link_bytes(self) -> dict[str, dict[str, int]]:
        """Return bytes by cluster, received (`in`) and sent (`out`), since the start of the process."""
        return {"in": self._counters.received_by_cluster(), "out": self._sender.sent_by_cluster()}

    def lane_addresses(self) -> tuple[str, ...]:
        """Return the host:port to which each lane is bound."""
        return tuple(lane.address for lane in self._lanes)

    def set_layers(self, manifest: Manifest, layers: tuple[int, ...]) -> None:
        """Set the layers that this slave holds; before start, and never differently."""
        layout = LayerLayout(manifest, layers)
        self._receiver.set_layers(layout)
        self._sender.set_layers(layout)

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        """Serve streams of incarnation `sinc`; a new incarnation drops every push and pull of the former one."""
        self._on_event = on_event
        self._admission.start(sinc)
        if not self._started:
            self._started = True
            for lane in self._lanes:
                name = f"lane-{lane.index}"
                threads = (0, 0) if self._in_place else (1, spare_threads(available_cores()))
                self._intake.append(Stage(f"{name}-intake", self._pool.most_chunks, self._stage_chunk, threads[0]))
                self._outgo.append(Stage(f"{name}-outgo", MOST_JOBS, self._send_chunk, threads[1]))
            for lane in self._lanes:
                lane.start(self)

    def open_push(
        self,
        push: PushId,
        places: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        codec: Codec = Codec.FP32,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Accept HELLOs of the push's ranks and ask for their chunks, in the order of `places`, into `buffers`."""
        if self._keyring is not None:
            self._keyring.open_transfer(push, keys, len(places))
        self._receiver.open_push(push, places, buffers, deadline_s, self._clock(), codec)

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        """Ask the push's ranks in the order of `places`, from the next turn on."""
        self._receiver.reorder_push(push, places)

    def drop_push(self, push: PushId) -> None:
        """Stop receiving a push; its buffers are not written after this returns."""
        self._forget_keys(push)
        self._receiver.drop_push(push)

    def open_pull(
        self,
        pull: PullId,
        version: VersionId,
        source: Arrays,
        chain: tuple[Update, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        """Serve `source`, or the updates of `chain` that a rank lacks, until the pull is closed or stalls."""
        if self._keyring is not None:
            self._keyring.open_transfer(pull, keys)
        self._sender.open_pull(pull, version, source, self._clock(), chain)

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        """Serve the rest from `source`; SourceMoved follows when no byte of the former one is in flight."""
        self._sender.move_pull(pull, source)
        self._lanes[0].wake()

    def close_pull(self, pull: PullId) -> None:
        """Stop serving a pull; Released follows when no byte of its source is in flight."""
        self._forget_keys(pull)
        self._sender.close_pull(pull, "closed")
        self._lanes[0].wake()

    def admit_probe(self, cluster: str, key: str) -> None:
        """Answer PROBEs of a connection with this key, for a while."""
        if self._keyring is not None:
            self._keyring.admit_probe(cluster, key, self._clock())

    def _admit_key(self, key: str) -> bool:
        """Whether to accept a connection with this key; called by the lanes."""
        admitted = self._keyring is None or self._keyring.admits(key, self._clock())
        if not admitted:
            self._counters.add_refused("key")
        return admitted

    def _forget_keys(self, transfer: PushId | PullId) -> None:
        if self._keyring is not None:
            self._keyring.close_transfer(transfer)

    def list_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that move now."""
        return self._receiver.list_transfers() + self._sender.list_transfers()

    def close(self) -> None:
        """Stop all threads and close all sockets; no buffer is accessed after this returns. Idempotent."""
        if self._over:
            return
        self._over = True
        self._sender.close_all("the data flow ends")
        for lane in self._lanes:
            lane.stop()
        for intake, outgo in zip(self._intake, self._outgo, strict=True):
            intake.close()
            outgo.close()
        for lane in self._lanes:
            lane.close()
        self._receiver.drop_all()
        while self._sender.holds_sources:  # libzmq frees them at lane.close; its trackers report it a moment later
            self._sender.close_all("the data flow ends")  # the shard's thread may have opened a pull meanwhile
            self._do_moves(self._sender.tick(self._clock()))
            self._pause(0.001)

    # ---- on the lanes' threads -------------------------------------------------------------------------------------

    @_catch_bad_frames
    def on_message(self, lane: int, peer: bytes, parts: list[zmq.Frame]) -> None:
        """Process one message from the network."""
        if len(parts) != 2:
            raise BadFrame("parts", f"expected a header and a body, got {len(parts)} parts")
        guard, body = self._lanes[lane].find_guard(peer), parts[1].buffer
        if guard is None:
            self._on_greeting(lane, peer, parts[0].buffer, body)
            return
        header = unpack_header(parts[0].buffer, self._run, len(body), self._chunk_bytes, guard.tag_bytes)
        if header.kind is Kind.CHUNK:
            claim = self._receiver.claim_chunk(lane, peer, header, body, self._clock(), guard)
            queued = self._intake[lane].put_item(claim)
            assert queued, "the intake queue is as deep as all that may be asked"
        else:
            self._on_control(lane, peer, header, guard.open_frame(header, body))

    def _on_greeting(self, lane: int, peer: bytes, part: Buffer, body: Buffer) -> None:
        """Begin the session of a connection to an encrypted lane; before that nothing else is believed."""
        if not is_greeting(part):
            raise BadFrame("seal", "expected the greeting of a connection, got another frame first")
        header, sessions = unpack_header(part, self._run, len(body), self._chunk_bytes), self._lanes[lane].sessions
        check_body(header, body)
        assert sessions is not None
        answer = sessions.greet_peer(peer, body)
        self._lanes[lane].post_frame(Outgoing(peer, *make_message(Kind.GREETING, self._run, header.stream, answer)))

    def _on_control(self, lane: int, peer: bytes, header: Header, body: Buffer) -> None:
        if header.kind is Kind.HELLO:
            self._on_hello(lane, peer, header, body)
        elif header.kind is Kind.WANT:
            self._send(lane, self._sender.on_want(lane, peer, header.stream, decode_want(body), self._clock()))
        elif header.kind is Kind.READY:
            self._do_moves(self._receiver.on_ready(lane, peer, header.stream, decode_ready(body)))
        elif header.kind is Kind.DONE:
            decode_done(body)
            self._sender.on_done(lane, peer, header.stream)
        elif header.kind is Kind.PROBE:
            self._on_probe(lane, peer, header, body)
        else:
            raise BadFrame("kind", f"a slave is not sent {header.kind.name}")

    def _on_probe(self, lane: int, peer: bytes, header: Header, body: Buffer) -> None:
        if self._keyring is not None and not self._keyring.admits(self._key_of(peer), self._clock()):
            raise BadFrame("key", "nothing is open any more for the key of this connection")
        self._lanes[lane].post_frame(self._probes[lane].make_answer(peer, header.stream, decode_probe(body)))

    def _key_of(self, peer: bytes) -> str:
        """Return the public key of a connection; "" on lanes that are not encrypted."""
        return "" if self._keyring is None else peer[:KEY_CHARS].decode()

    def _send(self, lane: int, jobs: Iterable[ChunkSend]) -> None:
        for job in jobs:
            queued = self._outgo[lane].put_item(job)
            assert queued, "the outgo queue is as deep as the jobs of a lane"

    def _on_hello(self, lane: int, peer: bytes, header: Header, body: Buffer) -> None:
        name, pieces, ready = decode_hello(body)
        key = self._key_of(peer)
        moves = self._admission.on_hello(lane, peer, header.stream, name, pieces, self._clock(), ready, key)
        if any(isinstance(move, Say) and move.kind is Kind.ERROR for move in moves):
            self._counters.add_refused("hello")
        self._do_moves(moves)

    @_catch_bad_frames
    def on_turn(self, lane: int) -> None:
        """After each batch of a lane: send the WANTs and chunks that are possible now, and end what is over."""
        now = self._clock()
        self._do_moves(self._receiver.plan_wants(lane, now))
        self._send(lane, self._sender.due(lane, now))
        if now - self._ticked_at[lane] >= TICK_S:
            self._ticked_at[lane] = now
            self._do_moves(self._sender.tick(now))
        if now - self._looked_at >= LOOK_S:  # two lanes may do so at once
            self._looked_at = now
            self._do_moves(self._receiver.tick(now))

    # ---- on the stages' threads ------------------------------------------------------------------------------------

    @_catch_bad_frames
    def _stage_chunk(self, claim: ClaimedChunk) -> None:
        try:
            moves = self._receiver.stage_chunk(claim)
        except BadFrame:
            self._lanes[claim.stream.lane].wake()  # the chunk is missing again: ask for it again
            raise
        except Exception as error:
            self._do_moves(self._receiver.give_up(claim, error))
            raise
        self._counters.add_received(claim.stream.push.push.cluster, claim.chunk.nbytes)
        self._do_moves(moves)

    @_catch_bad_frames
    def _send_chunk(self, job: ChunkSend) -> None:
        lane, peer = self._lanes[job.stream.lane], job.stream.peer
        guard = lane.find_guard(peer)
        if guard is not None and job.still_wanted():
            try:
                parts = job.make_frame(self._run, guard)
            except StaleVersion as overtaken:
                self._do_moves([self._sender.on_overtaken(job, str(overtaken))])
                return
            except BaseException:
                self._sender.on_not_sent(job)
                raise
            lane.post_frame(Outgoing(peer, *parts, watch=job))
        else:
            self._sender.on_not_sent(job)

    # ---- on any of these threads ------------------------------------------------------------------------------------

    def _do_moves(self, moves: Iterable[Move]) -> None:
        for move in moves:
            match move:
                case Say(lane, peer, kind, stream, body):
                    self._lanes[lane].post_frame(Outgoing(peer, Header(kind, self._run, stream, len(body), 0), body))
                case Wake(lane):
                    self._lanes[lane].wake()
                case FrameRefused(reason):
                    self._counters.add_refused(reason)
                case _:
                    self._report_event(move)

    def _report_event(self, event: FlowEvent) -> None:
        assert self._on_event is not None, "start() comes before any stream"
        if isinstance(event, PushOver):
            self._log.warning("push_refused", slave=self._slave, push=str(event.push), reason=event.reason)
        elif isinstance(event, Released):
            self._forget_keys(event.pull)
        self._on_event(event)

    def _count_refused(self, bad: BadFrame) -> None:
        self._counters.add_refused(bad.reason)
        self._log.debug("frame_refused", slave=self._slave, reason=bad.reason, message=str(bad))
