"""The section `shared`: the options on which all processes of the run must agree."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dips.codecs import Codec
from dips.config.section import PullCodec, Section
from dips.protocol.enums import LayerUnit
from dips.protocol.grouping import Grouping
from dips.protocol.options import DataOptions, OuterOptions, PenaltyOptions, StopOptions

MOST_PATTERNS = 64  # patterns of buffers' names, each compared with every parameter's name


class PenaltySection(Section):
    """The gates that decide which pushes count (docs/guides/gates.md). All other numbers begin as defaults of
    PenaltyOptions; `dips set` changes some of them in a running run.
    """

    gates: tuple[str, ...] = tuple(PenaltyOptions().gates)  # in this order; also the names of entry points
    beta: float = PenaltyOptions().beta  # gated above β times the threshold: higher gates less
    warmup_rounds: int = PenaltyOptions().warmup_rounds  # fewer in a run of few rounds

    @model_validator(mode="after")
    def _require_bounds(self) -> Self:
        self.make_options()
        return self

    def make_options(self) -> PenaltyOptions:
        """Return the penalty's options with these values."""
        return PenaltyOptions(**self.model_dump())


class Shared(Section):
    """The options on which all processes of the run must agree; their digest is compared at Join."""

    run: str
    outer: OuterOptions = OuterOptions()
    penalty: PenaltySection = PenaltySection()
    stop: StopOptions = StopOptions()
    data: DataOptions = DataOptions()
    heartbeat_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = (
        2.0  # of slaves and clusters; five missed end a lease
    )
    codec: Codec = Codec.FP32  # of pushes; lossy ones cost a rank 8 B more per parameter it pushes
    pull_codec: PullCodec = Codec.FP32  # of pulls; lossy ones round each θ as clusters pull it, and cost 8 B as above
    layers: LayerUnit = LayerUnit.BLOCK  # the unit of rules that weigh each layer separately, such as `merge: rda`
    share_buffers: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_PATTERNS)] = ()

    @field_validator("data", mode="before")
    @classmethod
    def _own_data(cls, value: Any) -> Any:
        """Read `data: own` as no ranges: clusters keep their own loaders, and the run does not track their data."""
        return {"ranges": 0} if value == "own" else value

    @model_validator(mode="after")
    def _require_momentum(self) -> Self:
        if self.pull_codec.lossy and not self.outer.has_momentum:
            raise ValueError(
                "a lossy pull_codec needs outer.momentum above 0, and a step other than sgd: by momentum comes back "
                "what rounding leaves over"
            )
        return self

    @property
    def grouping(self) -> Grouping:
        return Grouping(self.layers, self.share_buffers)

    @property
    def agreed(self) -> dict[str, Any]:
        """The options on which all must agree: all except the targets, which are in the ledger (`dips set`), and
        heartbeat_s, which may change when all processes are restarted.
        """
        return self.model_dump(mode="json", exclude={"stop": True, "heartbeat_s": True, "data": {"epochs"}})

    @property
    def digest(self) -> str:
        """A hash of the agreed values, independent of spelling: `0.7` and a default of 0.7 agree."""
        text = json.dumps(self.agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
