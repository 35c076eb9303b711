"""A whole run whose clusters train by timed_rank.py, and what they wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.namespaces import End
from benchmarks.timed_rank import Stretch, TimedPlan
from benchmarks.whole_run import WholeRun
from dips.protocol.manifest import Manifest
from dips.telemetry import timeline


class TimedRun(WholeRun):
    """`plans` by cluster; `keys` stand in every cluster's file."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        plans: Mapping[str, TimedPlan],
        keys: Mapping[str, Any],
        *,
        slaves: int,
        versions: int = 0,
        hosts: Mapping[str, End] | None = None,
    ) -> None:
        """A slot for each cluster, since all push at once; the window is the default one."""
        super().__init__(
            directory, manifest, clusters=len(plans), slaves=slaves, versions=versions, window_s=None, hosts=hosts
        )
        assert list(plans) == self.clusters
        self._plans, self._own_keys = plans, keys

    def _keys(self, name: str) -> dict[str, Any]:
        metrics = self._plans[name].metrics
        return {**self._own_keys, **({"http": metrics} if metrics else {})}

    def _words(self, name: str) -> list[str]:
        return ["benchmarks.timed_rank", name, str(self.meeting), json.dumps(asdict(self._plans[name]))]

    def stretches(self, name: str) -> list[Stretch]:
        """Of a cluster, oldest first."""
        return [Stretch(**line) for line in self.lines(name) if "version" in line]

    def beyond(self, name: str) -> dict[str, int | None]:
        """Bytes of host and device beyond the model, at the peak."""
        return next(line for line in self.lines(name) if "host" in line)

    def contributions(self) -> list[int]:
        """To each version that was made, in order."""
        marks = timeline.read_marks(self.timeline("master"))
        return [int(mark["contributions"]) for mark in marks if mark["kind"] == "version_committed"]
