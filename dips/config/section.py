"""What every section of the files is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

MIB = 1 << 20

LogLevel = Literal["debug", "info", "warning", "error"]


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
