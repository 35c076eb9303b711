"""What is measured of a lane, and which answers are none of this run's slaves: against a scripted lane on a socket."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

import pytest
import zmq

from dips.client.preflight import probe
from dips.client.preflight.probe import PADDING, ROUND_TRIPS, STREAM, measure_lane, measure_round_trip
from dips.errors import UnavailableSlave
from dips.wire.frame import CHECKSUMS, HEADER_BYTES, Header, Kind, decode_probe, run_id

Parts = list[bytes]
Answer = Callable[[int], Parts]  # the bytes that a PROBE asks for → the parts of its answer
POLL_MS = 10


def frame(length: int, kind: Kind = Kind.PROBE, run: str = "r") -> Parts:
    body = bytes(length)
    header, sealed = CHECKSUMS.seal_frame(Header(kind, run_id(run), STREAM, length, 0), body)
    return [header, bytes(sealed)]


@contextmanager
def scripted_lane(answer: Answer) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield the address of a lane and, growing, of each PROBE the bytes that it has and asks for."""
    probes: list[tuple[int, int]] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if socket.poll(POLL_MS):
                peer, _, body = socket.recv_multipart()
                probes.append((len(body), decode_probe(body)))
                if parts := answer(probes[-1][1]):
                    socket.send_multipart([peer, *parts])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{port}", probes
        finally:
            ended.set()
            thread.join()


def test_a_lane_is_measured_within_its_bounds() -> None:
    """Small probes for the round trip, then as many large ones as `most_bytes` allows, in each direction."""
    with scripted_lane(frame) as (address, probes):
        seen = measure_lane(address, "r", None, 3 * PADDING, 5.0)
    assert 0 < seen.round_trip_s < 5
    assert all(1e3 < rate < 1e13 for rate in (seen.up, seen.down))
    sizes = [(has > PADDING, asks) for has, asks in probes]
    assert [(size, len(list(same))) for size, same in groupby(sizes)] == [
        ((False, 0), ROUND_TRIPS), ((True, 0), 3), ((False, PADDING), 3),
    ]  # fmt: skip


def test_the_shortest_round_trip_counts() -> None:
    """One that was held up, by a busy host or the first packet's route, is no property of the way."""
    held_up = iter([0.5])

    def answer(length: int) -> Parts:
        time.sleep(next(held_up, 0.0))
        return frame(length)

    with scripted_lane(answer) as (address, _):
        assert measure_round_trip(address, "r", None) < 0.5


def test_a_rate_is_measured_for_a_bounded_time() -> None:
    """However much may be moved."""
    with scripted_lane(frame) as (address, probes):
        measure_lane(address, "r", None, 1 << 60, 0.02)
    assert probes[-1][1] == PADDING


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda _: [frame(0)[0], b"", b""], "what answers is no slave of this run: 3 parts came"),
        (lambda _: [bytes(HEADER_BYTES), b""], "what answers is no slave of this run: expected a frame that begins"),
        (lambda _: frame(0, run="another"), "what answers is no slave of this run: expected a frame of run"),
        (lambda _: [frame(1)[0], b"x"], "what answers is no slave of this run: the checksum of a PROBE body"),
        (lambda _: frame(1), "expected 0 bytes, got 1"),
        (lambda _: frame(0, Kind.WELCOME), "expected 0 bytes, got 0"),
        (lambda _: [], "a probe was not answered within 0.2 s: another run's slave"),
    ],
    ids=["parts", "no frame", "another run", "damaged", "too long", "another kind", "silence"],
)
def test_what_does_not_answer_as_a_slave_of_the_run(answer: Answer, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "ANSWER_S", 0.2 if why.startswith("a probe was not") else 20.0)
    with scripted_lane(answer) as (address, _), pytest.raises(UnavailableSlave, match=f"{address}: {why}"):
        measure_round_trip(address, "r", None)


def test_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is not the same as no answer: a wrong port, a firewall."""
    monkeypatch.setattr(probe, "ANSWER_S", 0.1)
    with scripted_lane(frame) as (address, _):
        pass
    with pytest.raises(UnavailableSlave, match=f"{address}: no connection within 0.1 s"):
        measure_round_trip(address, "r", None)
