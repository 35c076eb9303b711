"""Models that are not the run's are compared beside the run: one at a time, bounded, and for a tenth of the time."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import zlib

import pytest

from dips.errors import Busy, CorruptManifest, DifferentModel, RemoteProtocolError
from dips.master.runtime import LEAST_BYTES, REST, TIMES, ManifestDesk
from dips.protocol.effects import Acknowledged
from dips.protocol.events import ManifestOffered
from dips.protocol.manifest import Layer, Manifest, Parameter
from tests.waiting import eventually, until

OURS = Manifest.from_shapes([("l.w", (1000,))])
OTHER = Manifest.from_shapes([("l.w", (999,))])


def offer(text: str) -> ManifestOffered:
    spelled = text.encode()
    return ManifestOffered("west", hashlib.sha256(spelled).hexdigest(), zlib.compress(spelled))


def compare(text: str, ours: Manifest = OURS) -> Acknowledged:
    return asyncio.run(ManifestDesk(ours.to_json()).compare(offer(text)))


def model_of(parameters: int) -> Manifest:
    """All are spelled in as many bytes."""
    return Manifest((Layer("l", tuple(Parameter(f"l.{i:08d}", (1,)) for i in range(parameters))),))


def test_it_says_where_two_models_differ() -> None:
    with pytest.raises(
        DifferentModel, match=r"^this model is not the run's: l.w: expected shape \(1000,\), got \(999,\)$"
    ):
        compare(OTHER.to_json())
    assert compare(OURS.to_json()) == Acknowledged()


@pytest.mark.parametrize("text", ["junk", "{" * 100, "[" * 60_000, OURS.to_json().replace(",", ", ")])
def test_a_text_that_is_no_manifest_is_refused(text: str) -> None:
    """Nested without end, or spelled otherwise: its digest is not that of the model that it tells of."""
    with pytest.raises(CorruptManifest):
        compare(text)


def test_what_is_torn_or_not_what_was_announced_is_refused() -> None:
    offered = offer(OTHER.to_json())
    for packed, words in ((offered.packed[:-3], "torn"), (offer(OURS.to_json()).packed, "as announced")):
        with pytest.raises(RemoteProtocolError, match=words):
            asyncio.run(ManifestDesk(OURS.to_json()).compare(ManifestOffered("west", offered.digest, packed)))


def test_a_model_of_more_than_twice_the_runs_size_is_not_read() -> None:
    """It is refused by its length, with what to do; a small run reads a few thousand parameters anyway."""
    ours = model_of(10_000)
    assert len(ours.to_json()) > LEAST_BYTES
    with pytest.raises(DifferentModel, match="was not expected"):
        compare(model_of(TIMES * 10_000).to_json(), ours)
    with pytest.raises(DifferentModel, match=r"more than .* bytes.*dips check"):
        compare("[" * (TIMES * len(ours.to_json()) + 1), ours)
    with pytest.raises(DifferentModel, match=f"more than {LEAST_BYTES} bytes"):
        compare("[" * (LEAST_BYTES + 1))


async def test_one_at_a_time_and_for_a_tenth_of_the_time() -> None:
    """Whoever comes meanwhile, or soon after, is asked to wait; the event loop turns while one is read."""
    now = [100.0]
    desk, turned = ManifestDesk(OURS.to_json(), lambda: now[0]), asyncio.Event()
    first = asyncio.create_task(desk.compare(offer(OTHER.to_json())))
    asyncio.get_running_loop().call_soon(turned.set)
    await turned.wait()
    assert not first.done()
    with pytest.raises(Busy, match="one model at a time"):
        await desk.compare(offer(OTHER.to_json()))
    now[0] += 2.0
    with pytest.raises(DifferentModel):
        await first
    now[0] += 2.0 * REST - 0.1
    with pytest.raises(Busy):
        await desk.compare(offer(OTHER.to_json()))
    now[0] += 0.2
    with pytest.raises(DifferentModel):
        await desk.compare(offer(OTHER.to_json()))


async def test_whoever_hangs_up_makes_no_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread reads on: callers that hang up at once had a master read as many manifests as it has threads, all the
    time."""
    desk, read, reads = ManifestDesk(OURS.to_json(), lambda: 100.0), threading.Event(), list[ManifestOffered]()

    def find_differences(offered: ManifestOffered) -> Acknowledged:
        reads.append(offered)
        assert len(reads) > 1 or read.wait(20.0)
        return Acknowledged()

    monkeypatch.setattr(desk, "_find_differences", find_differences)
    first = asyncio.create_task(desk.compare(offer(OTHER.to_json())))
    await asyncio.to_thread(until, lambda: reads, "it is being read")
    first.cancel()
    await asyncio.wait([first])
    try:
        with pytest.raises(Busy):
            await desk.compare(offer(OTHER.to_json()))
    finally:
        read.set()
    await eventually(lambda: len(asyncio.all_tasks()) == 1)
    assert len(reads) == 1
