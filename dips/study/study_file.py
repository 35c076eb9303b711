"""The study file, STUDY.yaml: rows and a grid of settings become runs, one for each seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from dips.config.reading import explain_invalid, read_yaml
from dips.config.section import Section
from dips.errors import ConfigError
from dips.study.settings import Settings, make_settings, nest_keys

DEFAULT_FACTORY = "dips.study.text:build"
FORMAT = 1  # of a result's description
MOST_RUNS = 10_000  # most runs of a study, since a grid multiplies
Flat = dict[str, Any]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]


class StudyFile(Section):
    """The keys of the file, unchanged."""

    study: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    factory: str = DEFAULT_FACTORY  # MODULE:FUNCTION, returns a dips.study.task.Task
    seeds: Annotated[tuple[int, ...], Field(min_length=1, max_length=64)] = (1, 2, 3)
    fleets: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    base: Flat = Field(default_factory=dict)  # settings of every run
    rows: dict[str, Flat] = Field(default_factory=dict)  # settings that differ from base, by the row's name
    grid: dict[str, Values] = Field(default_factory=dict)  # every combination is a row
    tune: dict[str, Values] = Field(default_factory=dict)  # values of which each row uses its own best
    compare: str | None = None  # the row that others are compared with; null: the first


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A line of the study's table: its settings without tuned values and seed."""

    name: str
    flat: Flat
    tune: Mapping[str, tuple[Any, ...]]
    seeds: tuple[int, ...]
    compare: str | None = None  # the row that this one is compared with; None: the study's


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, whose description determines its result to the last bit."""

    row: str
    seed: int
    tuned: tuple[tuple[str, Any], ...]
    factory: str
    settings: Settings

    @property
    def description(self) -> dict[str, Any]:
        """All data on which the result depends, except for the code; with defaults, independent of the file's
        spelling.
        """
        return {"format": FORMAT, "factory": self.factory, "seed": self.seed, "settings": asdict(self.settings)}

    def digest(self, code: str) -> str:
        """Return the name of its result; `code` is the digest of the code that computes it."""
        text = json.dumps([self.description, code], sort_keys=True, separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Study:
    """A study that was read and checked: every run that it may need can be made."""

    name: str
    factory: str
    rows: tuple[StudyRow, ...]
    compare: str
    fleets: Mapping[str, tuple[Any, ...]]

    def plan_run(self, row: StudyRow, seed: int, tuned: tuple[tuple[str, Any], ...]) -> RunPlan:
        nested = nest_keys({**row.flat, **dict(tuned)})
        return RunPlan(row.name, seed, tuned, self.factory, make_settings(nested, self.fleets))

    def plan_first(self) -> list[RunPlan]:
        """Return the plans of every row at every tuned value, with its first seed."""
        return [self.plan_run(row, row.seeds[0], tuned) for row in self.rows for tuned in list_tunings(row)]

    def plan_rest(self, best: Mapping[str, tuple[tuple[str, Any], ...]]) -> list[RunPlan]:
        """Return the plans of the other seeds, at each row's best value."""
        most = max(len(row.seeds) for row in self.rows)
        return [
            self.plan_run(row, row.seeds[i], best[row.name])
            for i in range(1, most)  # seed by seed: a study that is stopped has paired rows
            for row in self.rows
            if row.name in best and i < len(row.seeds)
        ]

    def row(self, name: str) -> StudyRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def run_count(self) -> int:
        return sum(len(list(list_tunings(row))) + len(row.seeds) - 1 for row in self.rows)


def list_tunings(row: StudyRow) -> Iterator[tuple[tuple[str, Any], ...]]:
    for values in product(*row.tune.values()):
        yield tuple(zip(row.tune, values, strict=True))


def read_study(path: Path) -> Study:
    """Read STUDY.yaml. Raises ConfigError naming file, row and key."""
    try:
        file = StudyFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain_invalid(error)}") from error
    try:
        return make_study(file)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def make_study(file: StudyFile) -> Study:
    """Expand rows and grid; every run is checked before the first begins."""
    rows = list(_unfold_rows(file))
    if not rows:
        raise ConfigError("rows: expected one at least, or a grid")
    compare, names = file.compare or rows[0].name, [row.name for row in rows]
    for key, name in (("compare", compare), *((f"rows.{row.name}.compare", row.compare) for row in rows)):
        if name is not None and name not in names:
            raise ConfigError(f"{key}: no row {name!r}; there are {', '.join(names)}")
    study = Study(file.study, file.factory, tuple(rows), compare, file.fleets)
    if study.run_count > MOST_RUNS:
        raise ConfigError(f"grid: {study.run_count:,} runs; expected at most {MOST_RUNS:,}: name fewer values")
    for row in rows:
        for tuned in list_tunings(row):
            try:
                study.plan_run(row, row.seeds[0], tuned)
            except ConfigError as error:
                raise ConfigError(f"rows.{row.name}: {error}") from error
    return study


def _unfold_rows(file: StudyFile) -> Iterator[StudyRow]:
    for name, flat in file.rows.items():
        own = dict(flat)
        tune, seeds = own.pop("tune", file.tune), tuple(own.pop("seeds", file.seeds))
        compare = own.pop("compare", None)
        if not isinstance(tune, dict) or not all(isinstance(v, list | tuple) and v for v in tune.values()):
            raise ConfigError(f"rows.{name}.tune: expected keys with lists of values, got {tune!r}")
        _require_seeds(f"rows.{name}.seeds", seeds)
        tuned = {k: tuple(v) for k, v in tune.items() if k not in own}
        yield StudyRow(name, {**file.base, **own}, tuned, seeds, compare)
    _require_seeds("seeds", file.seeds)
    if file.grid:
        for values in product(*file.grid.values()):
            chosen = dict(zip(file.grid, values, strict=True))
            tune = {key: v for key, v in file.tune.items() if key not in chosen}
            name = ", ".join(f"{k} {_spell(v)}" for k, v in chosen.items())
            yield StudyRow(name, {**file.base, **chosen}, tune, file.seeds)


def _require_seeds(key: str, seeds: tuple[Any, ...]) -> None:
    if not seeds or len(set(seeds)) < len(seeds) or not all(isinstance(seed, int) for seed in seeds):
        raise ConfigError(f"{key}: expected different whole numbers, one at least, got {list(seeds)}")


def _spell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
