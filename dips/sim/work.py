"""The world's record of inner steps: each uses up a data range and some tokens, and is settled or lost once."""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Protocol

import numpy as np

from dips.codecs import Codec
from dips.data.steps import Part
from dips.dataclass import dataclass
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.records import Record, RolledBack, RoundEnded, VersionCommitted, VersionsRetired
from dips.sim.scenario import Site
from dips.slave.ports import F32


@dataclass(eq=False)
class Work:
    """One inner step. `lost` says why its effect was lost; empty while it is not."""

    cluster: str
    data_range: int
    tokens: int
    lost: str = ""
    parts: tuple[Part, ...] = ()  # its samples of ranges, if the scenario counts samples


@dataclass(eq=False)
class Use:
    """A data range that a trainer has used up; the same range may be leased and used again after it was undone."""

    data_range: int
    settled: bool = False


@dataclass
class WorkInHand:
    """The work of a trainer since its last install: the next push contains it, if it is not settled by then."""

    works: list[Work] = field(default_factory=list)
    used: list[Use] = field(default_factory=list)
    _frozen: tuple[int, int] = (0, 0)  # how many of both are in the push frozen last

    def freeze_work(self, books: Books) -> tuple[tuple[Work, ...], tuple[Use, ...]]:
        """Cut the work for a push; return the work and uses that it contains."""
        self._frozen = (len(self.works), len(self.used))
        works = tuple(work for work in self.works if id(work) not in books.settled)
        return works, tuple(use for use in self.used if not use.settled)

    def lose_work(self, cause: str, frozen_only: bool = False) -> None:
        """Mark the work as lost: all of it, or only the part that the last push has frozen."""
        works, used = self._frozen if frozen_only else (len(self.works), len(self.used))
        for work in self.works[:works]:
            work.lost = cause
        del self.works[:works], self.used[:used]
        self._frozen = (0, 0)


@dataclass(frozen=True)
class Frozen:
    """The intended content of a cluster's push, with which the ledger's rows are compared."""

    push: PushId
    base: VersionId
    content: dict[int, F32]  # content of a slot when all of it has arrived
    work: tuple[Work, ...]
    uses: tuple[Use, ...]
    diverged: bool = False  # its content is bad deliberately
    codec: Codec = Codec.FP32

    @property
    def ranges(self) -> tuple[int, ...]:
        """The data ranges used up by then and not settled."""
        return tuple(use.data_range for use in self.uses)

    @cached_property
    def tokens(self) -> int:
        """The tokens that it consumed."""
        return sum(w.tokens for w in self.work)


@dataclass
class Books:
    """All work and freezes of a world, and their settlement by the ledger."""

    work: list[Work] = field(default_factory=list)
    consumed: dict[str, int] = field(default_factory=dict)  # cluster → tokens of all its work
    frozen: dict[PushId, Frozen] = field(default_factory=dict)  # the newest freeze under each name
    settled: dict[int, str] = field(default_factory=dict)  # id of the work → outcome and push in which it was settled
    made: dict[PushId, VersionId] = field(default_factory=dict)  # the version that contains each push
    lineage: list[VersionId] = field(default_factory=lambda: [GENESIS])  # oldest first; the last is the head
    retired: set[VersionId] = field(default_factory=set)  # never offered again, though still on disks perhaps

    def record_work(self, work: Work) -> None:
        """Record an inner step."""
        self.work.append(work)
        self.consumed[work.cluster] = self.consumed.get(work.cluster, 0) + work.tokens

    def on_record(self, record: Record) -> None:
        """Process a durable record: follow the lineage, and settle accepted and gated pushes."""
        match record:
            case VersionCommitted():
                self.lineage.append(record.version)
                self.made.update((fold.push, record.version) for fold in record.folds)
                self._settle_round(record)
            case RoundEnded():
                self._settle_round(record)
            case RolledBack():
                self.lineage = [v for v in self.lineage if v not in record.undone]
            case VersionsRetired():
                self.retired.update(record.versions)
            case _:
                pass  # not about work or versions

    def _settle_round(self, ended: VersionCommitted | RoundEnded) -> None:
        for outcome in ended.outcomes:
            if outcome.kind != "skipped":
                frozen = self.frozen[outcome.push]
                self.settled.update(dict.fromkeys(map(id, frozen.work), f"{outcome.kind} in {outcome.push}"))
                for use in frozen.uses:
                    use.settled = True

    @property
    def head(self) -> VersionId:
        return self.lineage[-1]

    @property
    def offered_versions(self) -> list[VersionId]:
        """The versions of the lineage that slaves may be asked for, except the initial one, which they always have."""
        return [v for v in self.lineage[1:] if v not in self.retired]


# ---- model -----------------------------------------------------------------------------------------------------------
# In the simulation a step adds random noise, which suffices for the invariants of θ. The emulator of `dips study` takes
# real steps of real models instead (dips/study).


NOISES = 32  # noise vectors, one of which an inner step adds
MOST_TOKENS = 5  # most tokens in an inner step


class SimModel(Protocol):
    """The model of a run, on every cluster."""

    manifest: Manifest
    genesis: dict[int, F32]  # θ of v0@r0, flat layers by number

    def draw_tokens(self, site: Site) -> int:
        """Return the tokens of a cluster's next inner step, if data ranges do not determine them."""

    def take_inner_step(self, site: Site, theta: dict[int, F32], progress: float) -> float:
        """Train on one batch, in place; `progress` of the run is 0 to 1. Return the loss before the step."""

    def on_install(self, site: Site, attempt: int, theta: dict[int, F32], pulled: dict[int, F32]) -> None:
        """Process the replacement of a cluster's `theta` by what it `pulled`, or the merge of both; a new `attempt` has
        lost its optimizer's state.
        """

    def prepare_push(self, site: Site, push: PushId, theta: dict[int, F32]) -> dict[int, F32]:
        """Return the parameters that a cluster pushes: `theta`, or other arrays to simulate a fault."""


class NoiseModel:
    """Equal layers that move a little in each step, in one of a few directions."""

    def __init__(self, seed: int, layers: int, parameters: tuple[int, ...]) -> None:
        """Create the layers; `parameters` are the sizes of each layer's parameters."""
        self.manifest = Manifest(tuple(_make_layer(f"layers.{i}", parameters) for i in range(layers)))
        sizes = [layer.numel for layer in self.manifest.layers]
        rng = np.random.default_rng(seed)
        self.genesis: dict[int, F32] = {i: rng.standard_normal(n, dtype=np.float32) for i, n in enumerate(sizes)}
        self._noise = rng.standard_normal((NOISES, max(sizes)), dtype=np.float32) * np.float32(0.02)

    def draw_tokens(self, site: Site) -> int:
        return 1 + int(MOST_TOKENS * site.rng.random())

    def take_inner_step(self, site: Site, theta: dict[int, F32], progress: float) -> float:
        noise = self._noise[int(NOISES * site.rng.random())]
        for a in theta.values():
            a -= noise[: a.size]
        return 1.0

    def on_install(self, site: Site, attempt: int, theta: dict[int, F32], pulled: dict[int, F32]) -> None:
        pass  # noise has no state

    def prepare_push(self, site: Site, push: PushId, theta: dict[int, F32]) -> dict[int, F32]:
        return theta


def _make_layer(name: str, parameters: tuple[int, ...]) -> Layer:
    return Layer(name, tuple(Parameter(f"{name}.{k}", (numel,)) for k, numel in enumerate(parameters)))
