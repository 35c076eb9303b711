"""Compares a cluster's model with the run's, in a thread and outside the core.

Any enrolled cluster may send a manifest of any size and as often as it likes. So only one is read at a time, at most
twice as large as the run's own, and for at most a tenth of the time: other callers are asked to wait, which agents do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from dips.errors import Busy, CorruptManifest, DifferentModel
from dips.protocol.effects import Acknowledged
from dips.protocol.events import ManifestOffered
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest
from dips.wire.packed_manifest import ManifestTooLong, unpack_manifest

LEAST_BYTES = 1 << 16  # of JSON, always read: takes some milliseconds
TIMES = 2  # of the run's own JSON: a larger model differs in more than a person would read
REST = 9.0  # pause until the next comparison, in durations of the last


class ManifestDesk:
    """Compares manifests for one master. `clock` returns monotonic seconds."""

    def __init__(self, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`text` is the JSON of the run's own manifest."""
        self._most = min(MAX_JSON_BYTES, max(LEAST_BYTES, TIMES * len(text.encode())))
        self._ours, self._clock = Manifest.from_json(text), clock
        self._reading, self._free_at = False, clock()

    async def compare(self, offered: ManifestOffered) -> Acknowledged:
        """Raise DifferentModel with the first differences, or another error if it is no manifest; return if it is the
        run's.
        """
        begun = self._clock()
        if self._reading or begun < self._free_at:
            raise Busy("manifest: the master compares one model at a time: wait and ask again")
        self._reading = True
        try:
            return await asyncio.to_thread(self._find_differences, offered)
        finally:
            self._reading, now = False, self._clock()
            self._free_at = now + REST * (now - begun)

    def _find_differences(self, offered: ManifestOffered) -> Acknowledged:
        try:
            text = unpack_manifest(offered.packed, offered.digest, self._most)
        except ManifestTooLong as error:
            raise DifferentModel(
                f"this model is not the run's: its manifest has more than {self._most} bytes, expected some "
                f"{len(self._ours.to_json())}; `dips check --model` says where they differ"
            ) from error
        theirs = Manifest.from_json(text)
        if theirs.digest != offered.digest:
            raise CorruptManifest(
                f"expected a manifest of digest {offered.digest[:12]}, as announced, got {theirs.digest[:12]}"
            )
        lines = self._ours.describe_differences(theirs)
        if not lines:
            return Acknowledged()
        raise DifferentModel("this model is not the run's: " + "; ".join(lines))
