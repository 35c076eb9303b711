"""The section `shared`: what every process of the run must agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from dips.config.section import MIB, Section
from dips.protocol.enums import LayerUnit, PullCodec, PushCodec
from dips.protocol.grouping import Grouping
from dips.protocol.options import DataOptions, OuterOptions, PenaltyOptions, StopOptions

LATER_KEYS: Mapping[str, Any] = {  # what each says of a run that began before it; no default of today
    "outer": {
        "merge": "mean",
        "step": "nesterov",
        "delay": 0,
        "weights": "tokens",
        "staleness_alpha": 0.0,
        "anchor": "current",
        "clip": {"per_layer": False},
    },
    "penalty": {"score": "linear", "joiner_cap": 5.0},
    "layers": "block",
}
EARLIER_RULES: Mapping[tuple[str, ...], str] = {("dips",): "dips", (): "none"}  # of `gates`, when it was `rule`
MOST_PATTERNS = 64  # of buffers' names: each is compared with every parameter's


class Shared(Section):
    """What every process of the run must agree on; its digest is compared at Join."""

    run: str
    outer: OuterOptions = OuterOptions()
    penalty: PenaltyOptions = PenaltyOptions()
    stop: StopOptions = StopOptions()
    data: DataOptions = DataOptions()
    chunk_bytes: Annotated[int, Field(ge=4096, le=MIB)] = MIB  # larger ZeroMQ messages were 3 to 5 times slower
    codec: PushCodec = PushCodec.FP32  # of pushes; lossy ones cost a rank 8 B more per parameter it pushes
    pull_codec: PullCodec = PullCodec.FP32  # of pulls; lossy ones make each θ of what clusters pull; the ranks' 8 B too
    layers: LayerUnit = LayerUnit.BLOCK  # what rules that weigh each layer alone weigh: `merge: rda`, for one
    share_buffers: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_PATTERNS)] = ()

    @field_validator("data", mode="before")
    @classmethod
    def _own_data(cls, value: Any) -> Any:
        """`data: own` is the word for no ranges: clusters keep their loaders, and nobody tracks what they read."""
        return {"ranges": 0} if value == "own" else value

    @model_validator(mode="after")
    def _require_momentum(self) -> Self:
        if self.pull_codec is not PullCodec.FP32 and not self.outer.has_momentum:
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
        """What all must agree on: everything but how far the run goes, which its ledger says (`dips set`)."""
        return self.model_dump(mode="json", exclude={"stop": True, "data": {"epochs"}})

    @property
    def digest(self) -> str:
        """Hash of the agreed values, not of the file's spelling: `0.7` and a default of 0.7 agree.

        Keys that came later are left out as long as they say what was so before them: older runs go on.
        """
        agreed = _without_later(self.agreed, LATER_KEYS)
        if (rule := EARLIER_RULES.get(tuple(agreed["penalty"]["gates"]))) is not None:
            del agreed["penalty"]["gates"]
            agreed["penalty"]["rule"] = rule
        text = json.dumps(agreed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _without_later(values: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict[str, Any]()
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(later.get(key), dict):
            kept[key] = _without_later(value, later[key])
        elif key not in later or value != later[key]:
            kept[key] = value
    return kept
