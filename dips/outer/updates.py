"""The newest outer steps as clusters pull them: in a codec of fewer bits, from one version to the next.

With a lossy `pull_codec` θ′ is *made* of what travels: θ′ = θ + update, so a cluster that holds θ and adds the update
holds θ′ bit for bit, as one that pulls all of it does (docs/protocol.md#updates). What rounding leaves over comes back
through the momentum (`kernels.round_update`). Blocks begin with each parameter, so that any range can be cut out.

What must stay true: a buffer is written by one unpublished update only, and never while a pull that trains may read it;
one buffer is always free of readers, so the next step never waits. Pulls that only read (exports, followers) hold no
buffer: what they are lent may be written again, so its version is compared after each chunk is copied. All are
allocated at start. Without a lossy codec it is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dips.codecs import UPDATE_BLOCK, Codec
from dips.ids import PullId, VersionId, reads_only
from dips.quantisers import QUANTISERS, Codes

WRITTEN = 1  # buffers that no pull may hold, so that the next update has one
Fields = Mapping[int, tuple[tuple[int, int], ...]]  # layer → start and number of elements of each of its parameters


def count_blocks(numel: int) -> int:
    """Blocks of one parameter: the last may be short."""
    return -(-numel // UPDATE_BLOCK)


def count_buffers(codec: Codec, pinned: int) -> int:
    """Count the buffers: those that one pull may take, and one for each pinned version; one is being written."""
    return codec.updates + max(WRITTEN, pinned) if codec.updates else 0


def bytes_per_parameter(codec: Codec, pinned: int) -> float:
    """Return the bytes of all buffers per parameter; each tensor of a model has up to one step more."""
    return count_buffers(codec, pinned) * codec.element_bytes


@dataclass(eq=False, slots=True)
class Update:
    """One buffer, and what it holds: how `version` came of `parent`."""

    codec: Codec
    codes: dict[int, Codes]  # by layer, an element each
    steps: dict[int, npt.NDArray[np.float32]]  # by layer, if it has blocks: those of one parameter after another
    version: VersionId | None = None  # None: nothing, or what is being written
    parent: VersionId | None = None
    pulls: set[PullId] = field(default_factory=set)  # that may read it


class Updates:
    """All updates of one slave; empty for fp32."""

    def __init__(self, codec: Codec, pinned: int) -> None:
        self.codec, self._count = codec, count_buffers(codec, pinned)
        self._buffers: list[Update] = []  # the least recently published first
        self._writing: Update | None = None
        self.nbytes = 0  # of all buffers

    def allocate_buffers(self, layers: Mapping[int, int], fields: Fields) -> None:
        """Take and touch all memory."""
        blocks = {layer: sum(count_blocks(numel) for _, numel in fields[layer]) for layer in layers}
        for _ in range(self._count):
            kind = QUANTISERS[self.codec].codes
            codes: dict[int, Codes] = {layer: np.full(numel, 0, kind) for layer, numel in layers.items()}
            steps = {layer: np.full(blocks[layer], 0, np.float32) for layer in layers if self.codec.block}
            self._buffers.append(Update(self.codec, codes, steps))
            self.nbytes += sum(a.nbytes for arrays in (codes, steps) for a in arrays.values())

    def begin_update(self) -> Update:
        """Take a buffer to write the next update into: the oldest that nobody reads."""
        assert self._writing is None, "one update is written at a time"
        unread = [update for update in self._buffers if not update.pulls]
        made = min(unread, key=lambda update: update.version is not None)  # of equals the first: the oldest
        made.version = made.parent = None
        self._writing = made
        return made

    def publish_update(self, version: VersionId, parent: VersionId) -> None:
        """Offer the buffer that was written, as the update from `parent` to `version`."""
        made, self._writing = self._writing, None
        if made is not None:
            made.version, made.parent = version, parent
            self._buffers.remove(made)
            self._buffers.append(made)

    def drop_update(self) -> None:
        """Discard the buffer that was written."""
        self._writing = None

    def pin_chain(self, pull: PullId, version: VersionId) -> tuple[Update, ...]:
        """Keep the updates that led to `version`, the last one last, for a pull: as many as there are and may be.

        A pull that only reads keeps none: they are lent, and it must compare `version` after it has read one.
        """
        chain: list[Update] = []
        while len(chain) < self.codec.updates and (last := self._update_to(version)) is not None:
            chain.insert(0, last)
            assert last.parent is not None
            version = last.parent
        if reads_only(pull.cluster):
            return tuple(chain)
        while chain and self._count_read(chain) > self._count - WRITTEN:
            chain.pop(0)  # slow readers hold the others
        for update in chain:
            update.pulls.add(pull)
        return tuple(chain)

    def unpin_chain(self, pull: PullId) -> None:
        """The pull reads nothing any more."""
        for update in self._buffers:
            update.pulls.discard(pull)

    def _count_read(self, more: list[Update]) -> int:
        return sum(bool(update.pulls) or update in more for update in self._buffers)

    def _update_to(self, version: VersionId) -> Update | None:
        return next((update for update in self._buffers if update.version == version), None)


def cut_parameters(fields: Fields, most: int) -> list[tuple[int, slice, slice]]:
    """Layer, elements and blocks of slices of at most `most` elements that cut no block in two."""
    assert most % UPDATE_BLOCK == 0
    cuts = []
    for layer, parameters in fields.items():
        block = 0
        for start, numel in parameters:
            for begin in range(0, numel, most):
                end = min(begin + most, numel)
                blocks = slice(block + begin // UPDATE_BLOCK, block + count_blocks(end))
                cuts.append((layer, slice(start + begin, start + end), blocks))
            block += count_blocks(numel)
    return cuts
