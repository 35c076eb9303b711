"""The study file, STUDY.yaml: settings by dotted keys; rows and a grid of them become runs, one for each seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache
from itertools import count, product
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from dips.codecs import Codec
from dips.config.reading import explain_invalid, read_yaml
from dips.config.section import PullCodec, Section
from dips.errors import ConfigError
from dips.protocol.enums import LayerUnit
from dips.protocol.options import Options
from dips.study.fleet import Fleet, FleetCluster
from dips.study.learner import Recipe

# ---- settings -------------------------------------------------------------------------------------------------------
# The settings of a study's run, given by dotted keys: `outer.lr: 0.7`, `inner.optimizer: muon`, `fleet: half`.
#
# The configuration's keys (`outer.*`, `penalty.*`, `timing.*`, codecs) are those of dips.yaml in this version: the
# study passes them to the same classes, which reject unknown keys.


SECTIONS = ("outer", "penalty", "timing")  # of dips.yaml
OWN = ("inner", "task")
WORDS = (
    "method", "fleet", "inner_steps", "pace", "overlap", "fragments", "codec", "pull_codec", "layers", "steps",
    "parallel",
)  # fmt: skip
METHODS = ("dips", "data_parallel", "synchronous", "naive", "heloco")

Nested = dict[str, Any]
ParallelShare = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class Settings:
    """The checked settings of a run."""

    method: str
    steps: int  # inner steps of all clusters together
    task: Nested  # arguments of the factory
    fleet: Fleet
    recipe: Recipe
    options: Options
    pull_codec: Codec
    layers: LayerUnit
    parallel: float = 0.0  # share of the run that is first data parallel


def nest_keys(flat: Mapping[str, Any]) -> Nested:
    """Convert `{"outer.lr": 0.7}` to `{"outer": {"lr": 0.7}}`; if a mapping and a dotted key overlap, the later one
    counts.
    """
    nested: Nested = {}
    for key, value in deepcopy(dict(flat)).items():  # rows share mappings, and dotted keys write into them
        at, *path = key.split(".")
        if at not in SECTIONS + OWN + WORDS or (path and at in WORDS):
            known = ", ".join((*WORDS, *(f"{s}.*" for s in SECTIONS + OWN)))
            raise ConfigError(f"{key}: unknown key of a run; expected one of {known}")
        if not path and at in WORDS:
            nested[at] = value
            continue
        if not path and not isinstance(value, Mapping):
            raise ConfigError(f"{key}: expected keys and their values, got {value!r}")
        place = nested
        for part in [at, *path][:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {part} is a value already, and cannot have keys of its own")
        last = [at, *path][-1]
        known_value = place.get(last)
        both = isinstance(known_value, dict) and isinstance(value, Mapping) and not path
        place[last] = {**known_value, **value} if both else value  # type: ignore[dict-item]
    return nested


def make_settings(nested: Nested, fleets: Mapping[str, tuple[Any, ...]]) -> Settings:
    """Check a run's nested keys; `fleets` are the study's, by name. Raises ConfigError naming the key."""
    method = nested.get("method", METHODS[0])
    if method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    steps = nested.get("steps")
    if not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"steps: expected a whole number of inner steps, at least 1, got {steps!r}")
    words = {key: nested[key] for key in ("inner_steps", "pace", "overlap", "fragments") if key in nested}
    fleet = _checked(Fleet, {"members": _find_members(nested.get("fleet"), fleets), **words}, "")
    _refuse_lone_edit(fleet, nested)
    options = {section: nested[section] for section in (*SECTIONS, "codec") if section in nested}
    settings = Settings(
        method, steps, dict(nested.get("task", {})), fleet, _checked(Recipe, nested.get("inner", {}), "inner"),
        _checked(Options, options, ""), _checked(PullCodec, nested.get("pull_codec", "fp32"), "pull_codec"),
        _checked(LayerUnit, nested.get("layers", "block"), "layers"),
        _checked(ParallelShare, nested.get("parallel", 0.0), "parallel"),
    )  # fmt: skip
    _refuse_senseless(settings)
    return settings


def _find_members(fleet: Any, fleets: Mapping[str, tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return a fleet given by its name or as a list; a number is a cluster with that many seconds per step."""
    if isinstance(fleet, str):
        if fleet not in fleets:
            raise ConfigError(f"fleet: no {fleet!r}; the study has {', '.join(fleets) or 'none'}")
        fleet = fleets[fleet]
    if not isinstance(fleet, list | tuple):
        raise ConfigError(f"fleet: expected a name, or a list of clusters, got {fleet!r}")
    return tuple(_read_member(member) for member in fleet)


def _read_member(raw: Any) -> FleetCluster:
    if isinstance(raw, int | float):
        return FleetCluster(float(raw))
    if isinstance(raw, Mapping) and isinstance(raw.get("fault"), str):
        raw = {**raw, "fault": {"kind": raw["fault"]}}
    member: FleetCluster = _checked(FleetCluster, raw, "fleet")
    return member


def _refuse_lone_edit(fleet: Fleet, nested: Nested) -> None:
    gates = nested.get("penalty", {}).get("gates")
    merge = str(nested.get("outer", {}).get("merge", ""))
    edit = merge.startswith("edit") or (isinstance(gates, list | tuple) and "edit" in gates)
    if edit and len(fleet.members) < 2:
        raise ConfigError("edit compares clusters with each other: expected two or more in `fleet`, got 1")


def _refuse_senseless(settings: Settings) -> None:
    """Raise ConfigError for settings that are valid alone but not together."""
    clusters = len(settings.fleet.members)
    if settings.method == "data_parallel" and settings.steps < clusters:
        raise ConfigError(f"steps: expected at least {clusters}, one of each cluster, got {settings.steps}")
    fewest = min(settings.fleet.due_steps(settings.steps * (1.0 - settings.parallel)).values())
    if settings.method != "data_parallel" and fewest < settings.fleet.inner_steps:
        raise ConfigError(
            f"steps: {settings.steps} of {clusters} clusters are not one push of each: expected at least "
            f"{ceil(settings.steps * settings.fleet.inner_steps / fewest)}, or a smaller inner_steps"
        )
    if settings.method == "dips" and settings.pull_codec.lossy and not settings.options.outer.has_momentum:
        raise ConfigError("pull_codec: a lossy one needs outer.momentum above 0, and a step other than sgd")
    if settings.method != "dips" and not isinstance(settings.options.outer.lr, float | int):
        raise ConfigError(f"outer.lr: {settings.method} takes a number, got {settings.options.outer.lr!r}")
    if settings.parallel and settings.method not in ("dips", "synchronous"):
        raise ConfigError(f"parallel: expected method dips or synchronous, got {settings.method}")
    if settings.parallel and any(m.joins for m in settings.fleet.members):
        raise ConfigError("parallel: all clusters begin data parallel together: expected joins 0 for each")
    if settings.method != "dips" and any(m.fault or m.joins or m.leaves < 1 for m in settings.fleet.members):
        raise ConfigError(f"method: {settings.method} knows no faults, joins or leaves; only dips does")


@cache
def _adapter_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _checked(kind: Any, raw: Any, key: str) -> Any:
    """Validate `raw` as a `kind`; unknown keys are rejected by name, with the message of its own checks."""
    try:
        return _adapter_of(kind).validate_python(raw)
    except ConfigError as error:  # from a __post_init__
        raise ConfigError(str(error)) from error
    except ValidationError as error:
        text = explain_invalid(error)
        raise ConfigError(f"{key}.{text}" if key and not text.startswith(":") else f"{key}{text}") from error


# ---- study file -----------------------------------------------------------------------------------------------------


DEFAULT_FACTORY = "dips.study.text:build"
FORMAT = 1  # of a result's description
MOST_RUNS = 10_000  # most runs of a study, since a grid multiplies
Flat = dict[str, Any]
Values = Annotated[tuple[Any, ...], Field(min_length=1)]
Tuned = tuple[tuple[str, Any], ...]  # the keys that a row tunes, with one value for each


class StudyFile(Section):
    """The keys of the file, unchanged."""

    study: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    factory: str = DEFAULT_FACTORY  # MODULE:FUNCTION, returns a dips.study.task.Task
    seeds: Annotated[tuple[int, ...], Field(min_length=1, max_length=64)] = (1, 2, 3)
    fleets: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    base: Flat = Field(default_factory=dict)  # settings of every run
    rows: dict[str, Flat] = Field(default_factory=dict)  # settings that differ from base, by the row's name
    grid: dict[str, Values] = Field(default_factory=dict)  # every combination is a row
    tune: dict[str, Values] = Field(default_factory=dict)  # values of which each row takes its own best
    compare: str | None = None  # the row that others are compared with; null: the first


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A line of the study's table: its settings without tuned values and seed."""

    name: str
    flat: Flat
    tune: Mapping[str, tuple[Any, ...]]
    seeds: tuple[int, ...]
    compare: str | None = None  # the row that this one is compared with; None: the study's

    @property
    def searched(self) -> Mapping[str, tuple[Any, ...]]:
        """The keys to tune that have more than one value."""
        return {key: values for key, values in self.tune.items() if len(values) > 1}

    @property
    def untuned(self) -> Tuned:
        """The values of the keys to tune before the first run: the row's or `base`'s, or the middle ones of lists."""
        known = {key: self.flat[key] for key in self.searched if key in self.flat}
        return tuple((key, known.get(key, values[len(values) // 2])) for key, values in self.tune.items())

    @property
    def tuning_seed(self) -> int:
        """The seed on which values are chosen: the least number that is none of the row's seeds."""
        return next(seed for seed in count() if seed not in self.seeds)

    def list_tunings(self) -> list[Tuned]:
        """Return each value to try while the other keys have theirs of before the first run."""
        kept = dict(self.untuned)
        return list(dict.fromkeys(tuple({**kept, k: v}.items()) for k, values in self.searched.items() for v in values))


@dataclass(frozen=True, slots=True)
class RunPlan:
    """One run, whose description determines its result to the last bit."""

    row: str
    seed: int
    tuned: Tuned
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

    def plan_run(self, row: StudyRow, seed: int, tuned: Tuned) -> RunPlan:
        nested = nest_keys({**row.flat, **dict(tuned)})
        return RunPlan(row.name, seed, tuned, self.factory, make_settings(nested, self.fleets))

    def can_run(self, row: StudyRow, tuned: Tuned) -> bool:
        """Whether the settings are valid with these values."""
        try:
            self.plan_run(row, row.tuning_seed, tuned)
        except ConfigError:
            return False
        return True

    def plan_tuning(self) -> list[RunPlan]:
        """Return the plans of every value to tune, as far as they are known before the first run."""
        return [self.plan_run(row, row.tuning_seed, tuned) for row in self.rows for tuned in row.list_tunings()]

    def plan_results(self, best: Mapping[str, Tuned]) -> list[RunPlan]:
        """Return the plans of all seeds, at each row's best values."""
        most = max(len(row.seeds) for row in self.rows)
        return [
            self.plan_run(row, row.seeds[i], best[row.name])
            for i in range(most)  # seed by seed: a study that is stopped has paired rows
            for row in self.rows
            if row.name in best and i < len(row.seeds)
        ]

    def row(self, name: str) -> StudyRow:
        return next(row for row in self.rows if row.name == name)

    @property
    def run_count(self) -> int:
        """The runs if no best value is at the edge of its list."""
        return sum(len(row.list_tunings()) + len(row.seeds) for row in self.rows)


# ---- tuning ---------------------------------------------------------------------------------------------------------
# Each row at its own best of the values in `tune`, chosen on a seed that none of its results has.
#
# Keys are tuned one after another: each at the best values of those before it, and at the values that the row or `base`
# has for those after it. So three keys of four values are twelve runs and not 64. If the best of a list of numbers is
# at its edge, the list goes on in the same ratio.


MOST_ADDED = 4  # values added to a list
DIGITS = 4  # of an added value


class Tuning:
    """The search for the best values of one row."""

    def __init__(self, study: Study, row: StudyRow) -> None:
        self._study, self._row = study, row
        self._best = dict(row.untuned)
        self._values = {key: list(values) for key, values in row.tune.items()}
        self._open = list(row.searched)
        self._losses: dict[Tuned, float] = {}
        self.edges: tuple[str, ...] = ()  # the keys whose best value stayed at the edge of those that were tried

    @property
    def best(self) -> Tuned:
        """The best values so far."""
        return tuple(self._best.items())

    def note_loss(self, tuned: Tuned, loss: float) -> None:
        """Record the result of a run; infinite if it diverged or failed."""
        self._losses[tuned] = loss

    def list_wanted(self) -> list[Tuned]:
        """Return the values to run next; none once all keys are tuned."""
        while self._open:
            key = self._open[0]
            # Each value was checked beside those of before the first run, not beside the best of the keys before it.
            self._values[key] = [
                value for value in self._values[key] if self._study.can_run(self._row, self._with_value(key, value))
            ]
            tried = {value: self._with_value(key, value) for value in self._values[key]}
            if missing := [tuned for tuned in tried.values() if tuned not in self._losses]:
                return missing
            if tried:
                self._best[key] = min(tried, key=lambda value: self._losses[tried[value]])
            if not self._widen(key):
                del self._open[0]
        return []

    def _with_value(self, key: str, value: Any) -> Tuned:
        return tuple({**self._best, key: value}.items())

    def _widen(self, key: str) -> bool:
        """Add a value beyond the edge at which the best one is; return whether one was added."""
        values, best = self._values[key], self._best[key]
        others = [value for value in values if value != best]
        if not others or not _are_numbers(values) or best not in (min(values), max(values)) or not best:
            return False  # beyond 0, which ends a list, nothing follows
        beside = min(others, key=lambda value: abs(value - best))
        further = _round_digits(best * best / beside) if beside else best
        if isinstance(best, int):
            further = round(further)
        added = len(values) - len(self._row.tune[key])
        if (
            added >= MOST_ADDED
            or further in values
            or not self._study.can_run(self._row, self._with_value(key, further))
        ):
            self.edges += (key,)
            return False
        values.append(further)
        return True


def _are_numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _round_digits(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


# ---- reading --------------------------------------------------------------------------------------------------------


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
        for tuned in (row.untuned, *row.list_tunings()):
            try:
                study.plan_run(row, row.seeds[0], tuned)
            except ConfigError as error:
                raise ConfigError(f"rows.{row.name}: {error}") from error
    return study


def _unfold_rows(file: StudyFile) -> Iterator[StudyRow]:
    for name, flat in file.rows.items():
        own = dict(flat)
        tune, seeds = own.pop("tune", file.tune), own.pop("seeds", file.seeds)
        compare = own.pop("compare", None)
        _require_lists(f"rows.{name}.tune", tune)
        _require_seeds(f"rows.{name}.seeds", seeds)
        tuned = {k: tuple(v) for k, v in tune.items() if "tune" in flat or k not in own}
        yield StudyRow(name, {**file.base, **own}, tuned, tuple(seeds), compare)
    _require_lists("tune", file.tune)
    _require_seeds("seeds", file.seeds)
    if file.grid:
        for values in product(*file.grid.values()):
            chosen = dict(zip(file.grid, values, strict=True))
            tune = {key: v for key, v in file.tune.items() if key not in chosen}
            name = ", ".join(f"{k} {_spell(v)}" for k, v in chosen.items())
            yield StudyRow(name, {**file.base, **chosen}, tune, file.seeds)


def _is_list(values: Any) -> bool:
    return isinstance(values, list | tuple) and bool(values) and all(isinstance(v, int | float | str) for v in values)


def _require_lists(key: str, tune: Any) -> None:
    if not isinstance(tune, dict) or not all(_is_list(v) for v in tune.values()):
        raise ConfigError(f"{key}: expected keys with lists of numbers or words, got {tune!r}")


def _require_seeds(key: str, seeds: Any) -> None:
    whole = isinstance(seeds, list | tuple) and all(isinstance(seed, int) for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{key}: expected different whole numbers, one at least, got {seeds!r}")


def _spell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else str(value)
