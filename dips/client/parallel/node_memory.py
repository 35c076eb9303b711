"""Host memory mapped by several processes of one host: a file without a name, opened through its creator's /proc.

The first rank of a group creates it and sends its process id and descriptor; the others open it in /proc and compare a
random token at its end, so that neither another process with that id nor another host of that name is mistaken for it.
The kernel frees it with the last process. If one rank of a group cannot open it (separate containers), each rank of the
group uses its own memory.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from dips.client.parallel.exchange import RankExchange
from dips.client.parallel.replicas import Group, Place, SharedShards

TOKEN_BYTES = 16
NAME = "dips-shard"


@dataclass(frozen=True)
class NodeMemory:
    """The agreement of all ranks on shared memory, and this rank's mapping; `pages` None: this rank shares none."""

    shards: SharedShards
    pages: mmap.mmap | None


def share_memory(
    ranks: RankExchange,
    groups: Sequence[Group],
    private: Collection[Place],
    count_bytes: Callable[[Collection[Place]], int],
) -> NodeMemory:
    """Map one memory in each group of several ranks. Collective.

    private      parameters that this rank cannot have in shared memory
    count_bytes  returns the size of the group's shard without all its ranks' private parameters
    """
    if all(len(group) == 1 for group in groups):
        return NodeMemory(SharedShards(), None)
    told = [msgspec.msgpack.decode(words) for words in ranks.all_gather(msgspec.msgpack.encode(sorted(private)))]
    excluded = {group: {(l, k) for rank in group for l, k in told[rank]} for group in groups if len(group) > 1}
    mine = groups[ranks.rank]
    nbytes = count_bytes(excluded[mine]) if mine in excluded else 0
    made = _make_pages(nbytes) if nbytes and ranks.rank == mine[0] else None
    offers = ranks.all_gather(b"" if made is None else msgspec.msgpack.encode(made[1:]))
    pages = made[0] if made is not None else _open_pages(offers[mine[0]], nbytes)
    mapped = [bool(answer) for answer in ranks.all_gather(b"\1" if pages is not None else b"")]
    if made is not None:
        os.close(made[2])  # every rank that can open it has mapped it
    shared = {group: places for group, places in excluded.items() if all(mapped[rank] for rank in group)}
    group_of = {rank: group for group in shared for rank in group}
    return NodeMemory(SharedShards(group_of, shared), pages if ranks.rank in group_of else None)


def _make_pages(nbytes: int) -> tuple[mmap.mmap, int, int, bytes]:
    """Create shared memory; return the mapping, this process's id, the descriptor and the token."""
    descriptor, token = os.memfd_create(NAME), secrets.token_bytes(TOKEN_BYTES)
    os.ftruncate(descriptor, nbytes + TOKEN_BYTES)
    os.pwrite(descriptor, token, nbytes)
    return mmap.mmap(descriptor, nbytes), os.getpid(), descriptor, token


def _open_pages(offer: bytes, nbytes: int) -> mmap.mmap | None:
    """Map the offered memory; None if it cannot be opened here, or the token differs."""
    if not offer or not nbytes:
        return None
    pid, number, token = msgspec.msgpack.decode(offer)
    try:
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
    except OSError:
        return None
    try:
        same = os.fstat(descriptor).st_size == nbytes + TOKEN_BYTES
        if same and os.pread(descriptor, TOKEN_BYTES, nbytes) == token:
            return mmap.mmap(descriptor, nbytes)
        return None
    finally:
        os.close(descriptor)
