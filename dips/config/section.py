"""What every section of the files is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

MIB = 1 << 20


class Section(BaseModel):
    """A mapping of the file: unknown keys are refused by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)
