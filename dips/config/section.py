"""The base class and common types of all sections of the configuration files."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from dips.codecs import PULL_CODECS, Codec

MIB = 1 << 20
STALL_HEARTBEATS = 15  # who owes bytes and is silent for so long has stalled, at both ends of a lane: 30 s by default


def _require_updates(codec: Codec) -> Codec:
    if codec not in PULL_CODECS:
        raise ValueError(f"expected one of {', '.join(PULL_CODECS)}: {codec} is for pushes only")
    return codec


PullCodec = Annotated[Codec, AfterValidator(_require_updates)]
LogLevel = Literal["debug", "info", "warning", "error"]


class Section(BaseModel):
    """A mapping in a configuration file; unknown keys are rejected by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
