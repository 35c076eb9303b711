"""Intake, pool and credit: what is asked, what is believed, and that the books always balance."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dips.codecs import UPDATE_BLOCK, Codec
from dips.transport.intake import (
    CHUNK_S,
    FIRST_BYTES,
    FLOOR_BYTES,
    LEAST_BYTES,
    LEAST_CHUNK_BYTES,
    MOST_BYTES,
    MOST_CHUNKS,
    UNIT_CHUNKS,
    Credit,
    Intake,
    LinkRate,
    Transit,
)
from dips.wire.frame import Header, Kind, Range, range_type

MIB = 1 << 20


def header(chunk: Range, nbytes: int | None = None) -> Header:
    return Header(
        Kind.CHUNK, 0, 0, chunk.nbytes if nbytes is None else nbytes, 0, chunk.layer, chunk.param, chunk.offset
    )


def make(nbytes: int, pool: Transit | None = None, chunk_bytes: int = MIB) -> Intake:
    return Intake([Range(0, 0, 0, nbytes // 4)], chunk_bytes, pool or Transit(256 * MIB), 0.0, LinkRate(1e9))


def asked(intake: Intake, allowance: int = 1 << 60) -> list[Range]:
    return [chunk for unit in intake.ask_chunks(0.0, allowance) for chunk in unit]


def test_a_stream_is_asked_for_its_credit_in_units():
    """The first asking fills the first credit, in WANTs of few chunks."""
    intake = make(100 * MIB)
    units = intake.ask_chunks(0.0, 1 << 60)
    assert sum(c.nbytes for u in units for c in u) == FIRST_BYTES
    assert all(len(unit) <= UNIT_CHUNKS for unit in units)


def test_more_is_asked_when_half_is_here():
    """Nothing is asked while more than half is in flight; then the credit is filled up again."""
    intake = make(100 * MIB)
    chunks = asked(intake)
    assert asked(intake) == []
    for chunk in chunks[: len(chunks) // 2]:
        assert intake.claim_chunk(header(chunk), 0.0) == chunk
        intake.mark_received(chunk)
    assert sum(c.nbytes for unit in intake.ask_chunks(9.0, 1 << 60) for c in unit) == FIRST_BYTES // 2
    assert intake.last_byte_at == 0.0, "to ask for more is no sign of life while something is owed"


def test_small_chunks_are_bounded_by_their_number():
    """A thousand norms in flight would pass the receive buffer's limit in frames; more are asked when half are here."""
    intake = Intake([Range(0, i, 0, 8) for i in range(1000)], MIB, Transit(256 * MIB), 0.0)
    chunks = asked(intake)
    assert len(chunks) == MOST_CHUNKS
    for number, chunk in enumerate(chunks[: MOST_CHUNKS // 2]):
        assert not asked(intake), number
        intake.claim_chunk(header(chunk), 0.0)
        intake.mark_received(chunk)
    assert len(asked(intake)) == MOST_CHUNKS // 2


def test_a_turn_bounds_what_is_asked():
    """The last chunk may pass the allowance, no further one."""
    assert len(asked(make(100 * MIB), allowance=MIB + 1)) == 2
    assert asked(make(100 * MIB), allowance=0) == []


def test_a_chunk_is_claimed_once():
    """Unasked, repeated and misshapen chunks are refused and change nothing."""
    intake = make(2 * MIB)
    stranger = Range(0, 0, 0, MIB // 4)
    assert intake.claim_chunk(header(stranger), 0.0) is None  # not asked yet
    first, second = asked(intake)
    assert intake.claim_chunk(header(first, nbytes=4), 0.0) is None  # of another length
    assert intake.claim_chunk(header(first), 0.0) == first
    assert intake.claim_chunk(header(first), 0.0) is None  # again, while it is copied
    intake.mark_received(first)
    assert intake.claim_chunk(header(first), 0.0) is None  # again, when it is here
    assert intake.left == second.nbytes


def test_a_wrong_chunk_is_asked_again():
    """Its bytes were not what its sender saw: it is missing, and only it."""
    intake = make(2 * MIB)
    first, second = asked(intake)
    intake.claim_chunk(header(first), 0.0)
    intake.mark_wrong(first)
    intake.claim_chunk(header(second), 0.0)
    intake.mark_received(second)
    assert asked(intake) == [first]


def test_what_was_asked_of_a_broken_connection_is_asked_again():
    """In the same order; what is here stays, what is being copied goes on."""
    pool = Transit(256 * MIB)
    intake = make(4 * LEAST_CHUNK_BYTES, pool, chunk_bytes=LEAST_CHUNK_BYTES)
    a, b, c, d = asked(intake)
    for chunk in (a, b):
        intake.claim_chunk(header(chunk), 0.0)
    intake.mark_received(a)
    intake.on_connection_lost()
    assert pool.used_bytes == b.nbytes
    intake.mark_received(b)
    assert asked(intake) == [c, d]


def test_an_empty_pool_is_waited_for():
    """Streams share one sum; what is given back can be asked by another."""
    pool = Transit(4 * MIB)
    first, second = make(8 * MIB, pool), make(8 * MIB, pool)
    chunks = asked(first)
    assert pool.used_bytes == pool.limit
    assert asked(second) == []
    first.claim_chunk(header(chunks[0]), 0.0)
    first.mark_received(chunks[0])
    assert len(asked(second)) == 1


def test_a_pool_never_gives_what_it_has_not():
    """Giving back more than was taken is our bug."""
    pool = Transit(FLOOR_BYTES)
    assert pool.take_bytes(FLOOR_BYTES)
    assert not pool.take_bytes(1)
    pool.give_back(FLOOR_BYTES)
    with pytest.raises(AssertionError):
        pool.give_back(1)


@given(st.lists(st.sampled_from(["ask", "here", "wrong", "lost"]), max_size=60), st.integers(1, 40))
def test_the_books_balance(steps, pieces):
    """Whatever happens in whatever order: in the end every byte is here once and nothing is in transit."""
    pool = Transit(64 * MIB)
    intake = Intake([Range(0, i, 0, 1000) for i in range(pieces)], 1024, pool, 0.0)
    claimed: list[Range] = []
    flight: list[Range] = []
    arrived: list[Range] = []
    for step in [*steps, *["ask", "here"] * (4 * pieces)]:
        if step == "ask":
            flight += asked(intake)
        elif step == "lost":
            intake.on_connection_lost()
            flight = []
        elif flight:
            chunk = flight.pop(0)
            claimed.append(chunk)
            assert intake.claim_chunk(header(chunk), 0.0) == chunk
            if step == "wrong":
                intake.mark_wrong(chunk)
            else:
                intake.mark_received(chunk)
                arrived.append(chunk)
        assert 0 <= pool.used_bytes <= pool.limit
        assert intake.in_flight == sum(c.nbytes for c in flight)
    assert intake.complete
    assert pool.used_bytes == 0
    assert len(set(arrived)) == len(arrived)
    assert sum(c.nbytes for c in arrived) == intake.total


def test_credit_grows_to_twice_bandwidth_times_round_trip():
    """A link of 100 MiB/s at 100 ms gets 20 MiB, and never more than the most or less than the least."""
    credit, now = Credit(), 0.0
    credit.on_want(now, idle=True)
    now += 0.1
    for _ in range(100):
        credit.on_chunk(MIB, now)
        now += 0.01
    assert 18 * MIB <= credit.bytes <= 22 * MIB
    slow, fast = Credit(), Credit()
    for measure, nbytes in ((slow, 1000), (fast, 1 << 40)):
        measure.on_want(0.0, idle=True)
        measure.on_chunk(nbytes, 1.0)
    assert slow.bytes == LEAST_BYTES
    assert fast.bytes == MOST_BYTES


def test_bandwidth_is_measured_over_a_round_trip_at_least():
    """What had piled up on a long way comes in one burst: that is not how fast the link is."""
    credit = Credit()
    credit.on_want(0.0, idle=True)
    credit.on_chunk(1000, 1.0)
    credit.on_chunk(1000, 1.05)
    assert credit.latest_bytes_per_s == 1000.0
    credit.on_chunk(1000, 2.0)
    assert credit.latest_bytes_per_s == 2000.0


def test_one_pause_does_not_shrink_the_credit():
    """The best of the last spans counts: a span in which the sender slept says nothing of the link."""
    credit, now = Credit(), 0.0
    credit.on_want(now, idle=True)
    for _ in range(40):
        now += 0.001
        credit.on_chunk(MIB, now)
    before = credit.bytes
    credit.on_chunk(MIB, now + 0.5)
    assert credit.bytes == before > LEAST_BYTES


def over_a_link(nbytes: int, bytes_per_s: float, delay_s: float) -> float:
    """Seconds that a stream takes over a link that is simulated: WANTs wait `delay_s`, chunks queue for the wire."""
    intake = unmeasured(nbytes)
    arrivals: deque[tuple[float, Range]] = deque()
    now, free = 0.0, 0.0
    while not intake.complete:
        for unit in intake.ask_chunks(now, 1 << 60):
            for chunk in unit:
                free = max(free, now + delay_s) + chunk.nbytes / bytes_per_s
                arrivals.append((free + delay_s, chunk))
        now, chunk = arrivals.popleft()
        assert intake.claim_chunk(header(chunk), now) == chunk
        intake.mark_received(chunk)
    return now


def unmeasured(nbytes: int) -> Intake:
    return Intake([Range(0, 0, 0, nbytes // 4)], MIB, Transit(256 * MIB), 0.0)


@pytest.mark.parametrize("kilobytes_per_s", [3, 10, 30, 100, 300])
def test_a_slow_link_shows_that_it_lives(kilobytes_per_s: float) -> None:
    """Where a chunk of 1 MiB took longer than `stall_s`, which is 30 s, the stream was broken before it was here."""
    intake, longest, now = unmeasured(int(4e5 * kilobytes_per_s) // 4 * 4), 0.0, 0.0
    while not intake.complete:
        for chunk in [chunk for unit in intake.ask_chunks(now, 1 << 60) for chunk in unit]:
            longest = max(longest, chunk.nbytes / (1e3 * kilobytes_per_s))
            now += chunk.nbytes / (1e3 * kilobytes_per_s)
            assert intake.claim_chunk(header(chunk), now) == chunk
            intake.mark_received(chunk)
    assert longest <= max(CHUNK_S, LEAST_CHUNK_BYTES / (1e3 * kilobytes_per_s)) < 30.0


def test_one_stream_tries_how_fast_a_link_is_and_the_others_know() -> None:
    """A small piece goes alone; when it is here the credit is asked for, by others from the beginning."""
    link = LinkRate()
    first, second = (Intake([Range(0, 0, 0, 100 * MIB)], MIB, Transit(256 * MIB), 0.0, link) for _ in range(2))
    (trial,) = asked(first)
    assert trial.nbytes == LEAST_CHUNK_BYTES
    assert asked(first) == []
    assert first.claim_chunk(header(trial), 0.05) == trial
    first.mark_received(trial)
    for intake in (first, second):
        chunks = asked(intake)
        assert sum(chunk.nbytes for chunk in chunks) > FIRST_BYTES - MIB, "the trial does not shrink the credit"
        assert {chunk.nbytes for chunk in chunks} <= {MIB, MIB - LEAST_CHUNK_BYTES}


def test_after_a_break_a_stream_tries_again_by_itself() -> None:
    """What did not come whole is asked again in pieces, each byte once, whatever others have seen."""
    intake = make(100 * MIB)
    assert asked(intake)[0].nbytes == MIB
    intake.on_connection_lost()
    (trial,) = asked(intake)
    assert trial.nbytes == LEAST_CHUNK_BYTES
    assert intake.claim_chunk(header(trial), 20.0) == trial
    intake.mark_received(trial)
    chunks = [chunk for unit in intake.ask_chunks(20.0, 1 << 60) for chunk in unit]
    assert {chunk.nbytes for chunk in chunks} == {LEAST_CHUNK_BYTES}, "3 kB/s"
    assert [chunk.offset for chunk in (trial, *chunks)] == [i * LEAST_CHUNK_BYTES // 4 for i in range(1 + len(chunks))]


@pytest.mark.parametrize("kind", [range_type(codec.dtype) for codec in Codec])
def test_pieces_of_a_chunk_are_whole_blocks(kind: type[Range]) -> None:
    """A block of int8 has one step: where it is cut, its bytes are others than before."""
    piece = kind(0, 0, 3, 1_000_003)
    intake, chunks = Intake([piece], MIB, Transit(256 * MIB), 0.0), list[Range]()
    while not intake.complete:
        for chunk in asked(intake):
            assert intake.claim_chunk(Header(Kind.CHUNK, 0, 0, chunk.nbytes, 0, *chunk[:3], chunk.dtype), 20.0) == chunk
            intake.mark_received(chunk)
            chunks.append(chunk)
    assert len(chunks) > 10
    assert sum(chunk.nbytes for chunk in chunks) == intake.total == piece.nbytes
    assert all((chunk.offset - 3) % UPDATE_BLOCK == 0 and type(chunk) is kind for chunk in chunks)
    assert sum(chunk.length for chunk in chunks) == piece.length


@pytest.mark.parametrize(("mbit", "delay_ms"), [(10, 20), (100, 20), (1000, 0.2), (1000, 20), (1000, 100), (10_000, 2)])
def test_a_stream_fills_its_link(mbit, delay_ms):
    """At 9 tenths of the line's rate and more, far and near, the ramp included; 20 s of bytes."""
    rate = mbit * 1e6 / 8
    nbytes = int(20 * rate) // 4 * 4
    assert over_a_link(nbytes, rate, delay_ms / 1e3) * rate <= nbytes / 0.9
