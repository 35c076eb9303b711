"""The two interfaces of a slave's shard: the data flow that moves bytes, and the disk that keeps them.

The shard (shard.py) uses both through these protocols: the daemon implements them with ZeroMQ and files, the simulation
with a simulated network and simulated disks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dips.codecs import Codec
from dips.ids import PullId, PushId, VersionId
from dips.outer.updates import Update
from dips.protocol.heartbeats import Transfer
from dips.slave.moves import FlowEvent

F32 = npt.NDArray[np.float32]
Arrays = Mapping[int, F32]  # layer index in the manifest → the layer's flat parameters


class Flow(Protocol):
    """The data flow of one slave."""

    def start(self, sinc: int, on_event: Callable[[FlowEvent], None]) -> None:
        """Serve streams of incarnation `sinc`; called again after each Register that changed it.

        `on_event` is called from the flow's own threads, and must return at once.
        """

    def open_push(
        self,
        push: PushId,
        places: tuple[int, ...],
        buffers: Arrays,
        deadline_s: float,
        codec: Codec,
        keys: tuple[str, ...] = (),
    ) -> None:
        """Accept HELLOs of the push's len(places) ranks and ask for their chunks, by their places, into `buffers`.

        places      place of each rank in the line of all pushes; the smallest is asked first
        deadline_s  from one rank's HELLO to the next one's
        codec       fp32: chunks are written; a lossy one: they are added to the base in `buffers`
        keys        public key of each rank; not needed for lanes without encryption
        Errors      RemoteProtocolError: the lanes are encrypted, and these are no keys of that many ranks
        """

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        """Ask rank i at place `places[i]` of the line of all pushes; present turns go on. Ignored if unknown."""

    def drop_push(self, push: PushId) -> None:
        """Stop receiving a push; its buffers are not written after this returns. Ignored if unknown."""

    def open_pull(
        self,
        pull: PullId,
        version: VersionId,
        source: Arrays,
        chain: tuple[Update, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        """Serve `source` to the pull's ranks until it is closed, or one of them does not take the chunks it asked for.

        chain  the updates that led to the version, the last one last: for ranks that hold the parent of one of them
        keys, Errors  as for `open_push`
        """

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        """Serve the rest from `source`, the same bytes elsewhere; SourceMoved follows when none of the former is in
        flight.

        Chunks asked for before may still be sent from the former source. Ignored if the pull is closed or unknown.
        """

    def close_pull(self, pull: PullId) -> None:
        """Stop serving a pull; Released follows when no byte of its source is in flight. Ignored if unknown."""

    def admit_probe(self, cluster: str, key: str) -> None:
        """Answer PROBEs of a connection with this key, which measures the path to the lanes, for a while."""

    def list_transfers(self) -> tuple[Transfer, ...]:
        """Return the transfers that move now, for heartbeats and status."""


class Disk(Protocol):
    """Snapshots of one slave; every call may raise OSError or CorruptSnapshot."""

    def complete_versions(self) -> tuple[VersionId, ...]:
        """Return versions whose snapshot is complete and of this run, ascending; damaged ones are skipped with a log
        line.
        """

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Reserve disk space for a snapshot with `nbytes` of θ and m; raise OSError (ENOSPC) if there is not enough."""

    def release_room(self, version: VersionId) -> None:
        """Release the space reserved for a snapshot that will not be written. Idempotent."""

    def write_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        """Make a snapshot durable (written aside, fsynced, renamed, directory fsynced); return its digest.

        A snapshot that this process has already written is not written again. Called on a thread of its own, one at a
        time; raise Stale soon after `is_wanted` becomes False.
        """

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both from the snapshot and verify every digest; v0@r0 comes from the initial model if not on disk."""

    def holds_initial(self) -> bool:
        """Whether v0@r0 can be read, as far as is known without reading it. Does not raise."""

    def keep_initial(self, theta: Arrays) -> None:
        """Make v0@r0 durable, read it back and compare digests; raise CorruptSnapshot if it is another model."""

    def map_theta(self, version: VersionId) -> Arrays | None:
        """Map θ of a complete snapshot, readable even after the snapshot is deleted; return None if there is none.

        The bytes are in the page cache, not in the pool. Does not raise: a snapshot that cannot be mapped counts as
        missing.
        """

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        """Remove snapshots; missing ones are ignored. Maps of them stay readable."""
