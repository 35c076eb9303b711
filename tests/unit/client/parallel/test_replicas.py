"""Which ranks share host memory, what then travels no more, and how another process finds that memory."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dips.client.parallel import shard_buffer
from dips.client.parallel.plan import Holding, LocalRect, RankLayout, Redistribution
from dips.client.parallel.rect import Rect
from dips.client.parallel.shard_buffer import SharedShards, find_replicas
from tests.open_files import nothing_left_open

WHOLE, LEFT, RIGHT = Rect.flat_run(0, 8), Rect.flat_run(0, 4), Rect.flat_run(4, 4)


def rank(host: str, writes: Rect, reads: Rect | None = None) -> RankLayout:
    holding = Holding((8,), (reads or writes,), (writes,))
    other = Holding((8,), (writes,), (writes,))
    return RankLayout.from_claims([("a", holding), ("b", other)], host)


def test_replicas_are_on_one_host_and_write_the_same() -> None:
    """What they read does not matter: of Megatron's distributed optimizer each rank has another part of the masters."""
    ranks = [rank("h0", WHOLE, LEFT), rank("h0", WHOLE, RIGHT), rank("h1", WHOLE), rank("h1", LEFT), rank("h0", WHOLE)]
    assert find_replicas(ranks) == ((0, 1, 4), (0, 1, 4), (2,), (3,), (0, 1, 4))
    named = replace(ranks[0], names=("a", "c"))
    assert find_replicas([ranks[0], named]) == ((0,), (1,))


def part(param: int) -> LocalRect:
    return LocalRect(param, 0, WHOLE)


def test_what_arrives_for_a_group_travels_once() -> None:
    """Within the group nothing does; from elsewhere its first rank receives it; what is private goes as it would."""
    group = (0, 1)
    shards = SharedShards({0: group, 1: group}, {group: {(0, 7)}})
    moves = Redistribution(
        {0: [part(1)], 1: [part(1), part(7)], 2: [part(1)]}, {0: [part(1)], 2: [part(1), part(7)]}, []
    )
    from_second = shards.filter_spread(1, 0, moves)
    assert from_second.sends == {1: [part(7)], 2: [part(1)]} and from_second.receives == {2: [part(7)]}
    from_third = shards.filter_spread(2, 0, moves)
    assert from_third.sends == {0: [part(1)], 1: [part(7)], 2: [part(1)]}
    assert shards.filter_spread(0, 0, moves).receives == {2: [part(1), part(7)]}
    assert not shards.is_complete(1, 0, moves)
    assert shards.is_complete(1, 0, Redistribution(receives={0: [part(1)]}))
    assert not shards.is_complete(1, 0, Redistribution(receives={0: [part(7)]}))
    assert SharedShards().filter_spread(2, 0, moves) == moves


def test_what_is_written_in_one_mapping_is_seen_in_the_other() -> None:
    """Found by process and descriptor; check_layouts.py does it between processes."""
    pages, pid, descriptor, token = shard_buffer._make_pages(4096)
    again = shard_buffer._open_pages(msgspec.msgpack.encode((pid, descriptor, token)), 4096)
    assert again is not None
    again[:5] = b"hello"
    assert pages[:5] == b"hello"
    assert shard_buffer._open_pages(msgspec.msgpack.encode((pid, descriptor, token)), 8192) is None, "of another size"


def test_what_is_not_that_memory_is_not_mapped() -> None:
    """Another token, a descriptor that is something else, a process that is gone, no offer."""
    pages, pid, descriptor, token = shard_buffer._make_pages(64)
    with nothing_left_open():
        for offer in ((pid, descriptor, bytes(16)), (pid, 0, token), (pid, 9999, token), (1 << 30, descriptor, token)):
            assert shard_buffer._open_pages(msgspec.msgpack.encode(offer), 64) is None
        assert shard_buffer._open_pages(b"", 64) is None and len(pages) == 64


class SharingRanks:
    """A job of three as its third rank sees it: the first two share, the second of them can map nothing."""

    rank, world_size = 2, 3

    def __init__(self, *said: list[bytes]) -> None:
        self._said = list(said)

    def all_gather(self, message: bytes) -> list[bytes]:
        return [*self._said.pop(0), message]


@pytest.mark.parametrize(("mapped", "sharing"), [(b"\1", {0, 1}), (b"", set())])
def test_a_group_shares_if_all_of_it_can(mapped: bytes, sharing: set[int]) -> None:
    """And every rank of the job knows, since what it sends depends on it."""
    private = [msgspec.msgpack.encode([[0, 1]]), msgspec.msgpack.encode([[0, 2]])]
    ranks = SharingRanks(private, [b"offer", b""], [b"\1", mapped])
    node = shard_buffer.share_memory(ranks, [(0, 1), (0, 1), (2,)], [], lambda _: 64)  # type: ignore[arg-type]
    assert set(node.shards.group_of) == sharing and node.pages is None
    assert [node.shards.shares(0, (0, k)) for k in range(4)] == [bool(sharing), False, False, bool(sharing)]


def test_memory_that_is_mapped_needs_no_descriptor() -> None:
    """The rank that makes it keeps it open until all have answered, and no longer."""

    class First(SharingRanks):
        rank, world_size = 0, 2

        def all_gather(self, message: bytes) -> list[bytes]:
            return [message, *self._said.pop(0)]

    with nothing_left_open():
        node = shard_buffer.share_memory(
            First([msgspec.msgpack.encode([])], [b""], [b"\1"]), [(0, 1)] * 2, [], lambda _: 64
        )  # type: ignore[arg-type]
        assert node.pages is not None and len(node.pages) == 64
        node.pages.close()
