"""The two seams of a slave: the data flow that moves bytes, and the disk that keeps them.

The shard (shard.py) orders both and knows neither: the daemon gives it ZeroMQ and files, the simulation a simulated
network and simulated disks.
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

        `on_event` is called from the flow's own threads, and returns at once.
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
        """Accept HELLOs of the push's ranks (there are len(places)) and ask them into `buffers`, by their places.

        places  of each rank in the line of all pushes; the smallest is asked first
        deadline_s  from one rank's HELLO to the next one's
        codec  fp32: what comes is written; a lossy one: it is added to the base that lies in `buffers`
        keys  public, of each rank; plain lanes ask for none
        Errors  RemoteProtocolError: the lanes are encrypted, and these are no keys of so many ranks
        """

    def reorder_push(self, push: PushId, places: tuple[int, ...]) -> None:
        """Ask rank i at place `places[i]` of the line of all pushes; who is being asked goes on. Unknown: nothing."""

    def drop_push(self, push: PushId) -> None:
        """Stop receiving; on return nobody writes into its buffers. An unknown push is nothing to drop."""

    def open_pull(
        self,
        pull: PullId,
        version: VersionId,
        source: Arrays,
        chain: tuple[Update, ...] = (),
        keys: tuple[str, ...] = (),
    ) -> None:
        """Serve `source` to the pull's ranks until it is closed, or one of them does not take what it asked for.

        chain  the updates that led to the version, the last one last: for ranks that hold where one of them begins
        keys, Errors  as of `open_push`
        """

    def move_pull(self, pull: PullId, source: Arrays) -> None:
        """Serve the rest from `source`, the same bytes elsewhere; SourceMoved once none of the old is in flight.

        What was asked before may still leave from the old source. A pull that is closed or unknown: nothing.
        """

    def close_pull(self, pull: PullId) -> None:
        """Serve no further; Released follows when the last byte in flight is gone. Unknown: nothing."""

    def admit_probe(self, cluster: str, key: str) -> None:
        """Let who shows this key measure the way to the lanes, for a while."""

    def list_transfers(self) -> tuple[Transfer, ...]:
        """What is moving now, for heartbeats and status."""


class Disk(Protocol):
    """Snapshots of one slave; every call may raise OSError or CorruptSnapshot."""

    def complete_versions(self) -> tuple[VersionId, ...]:
        """Versions whose snapshot is whole and of this run, ascending; a bad one is passed over loudly."""

    def reserve_room(self, version: VersionId, nbytes: int) -> None:
        """Take the room that a snapshot with `nbytes` of θ and m will need; OSError (ENOSPC) if it is not there."""

    def release_room(self, version: VersionId) -> None:
        """Give back what was reserved for a snapshot that will not be written; nothing if nothing was."""

    def write_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays, is_wanted: Callable[[], bool]) -> str:
        """Make a snapshot durable (written aside, fsynced, renamed, directory fsynced); return its digest.

        One that this process wrote already is not written again. Called on a thread of its own, once at a time; raise
        Stale soon after it is wanted no more.
        """

    def read_snapshot(self, version: VersionId, theta: Arrays, momentum: Arrays) -> None:
        """Fill both from the snapshot, verifying every digest; v0@r0 comes from the initial model if not on disk."""

    def holds_initial(self) -> bool:
        """Whether v0@r0 can be read, as far as is known without reading it through. Raises nothing."""

    def keep_initial(self, theta: Arrays) -> None:
        """Make v0@r0 durable, read it back and compare it with its digests; CorruptSnapshot: it is another model."""

    def map_theta(self, version: VersionId) -> Arrays | None:
        """θ of a whole snapshot, to be read while it lies on the disk and after it is deleted; None if there is none.

        The bytes stand in the page cache, not in the pool. Raises nothing: what cannot be mapped is passed over.
        """

    def delete_snapshots(self, versions: tuple[VersionId, ...]) -> None:
        """Remove snapshots; a missing one is fine. What is mapped stays readable."""
