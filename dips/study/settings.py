"""The settings of a study's run, given by dotted keys: `outer.lr: 0.7`, `inner.optimizer: muon`, `fleet: half`.

The configuration's keys (`outer.*`, `penalty.*`, `timing.*`, codecs) are those of dips.yaml in this version: the study
passes them to the same classes, which reject unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dips.codecs import Codec
from dips.config.reading import explain_invalid
from dips.config.section import PullCodec
from dips.errors import ConfigError
from dips.protocol.enums import LayerUnit
from dips.protocol.options import Options
from dips.study.fleet import Fleet, FleetCluster
from dips.study.learner import Recipe

SECTIONS = ("outer", "penalty", "timing")  # of dips.yaml
OWN = ("inner", "task")
WORDS = ("method", "fleet", "inner_steps", "pace", "overlap", "fragments", "codec", "pull_codec", "layers", "steps")
METHODS = ("dips", "data_parallel", "synchronous", "post_local", "naive")

Nested = dict[str, Any]


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


def nest_keys(flat: Mapping[str, Any]) -> Nested:
    """Convert `{"outer.lr": 0.7}` to `{"outer": {"lr": 0.7}}`; if a mapping and a dotted key overlap, the later one
    counts.
    """
    nested: Nested = {}
    for key, value in flat.items():
        at, *path = key.split(".")
        if at not in SECTIONS + OWN + WORDS or (path and at in WORDS):
            known = ", ".join((*WORDS, *(f"{s}.*" for s in SECTIONS + OWN)))
            raise ConfigError(f"{key}: unknown key of a run; expected one of {known}")
        if not path and at in WORDS:
            nested[at] = value
            continue
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
    fastest = min(settings.fleet.due_steps(settings.steps).values())
    if settings.method != "data_parallel" and fastest < settings.fleet.inner_steps:
        raise ConfigError(
            f"steps: {settings.steps} of {clusters} clusters are not one push of each: expected at least "
            f"{round(settings.steps * settings.fleet.inner_steps / fastest)}, or a smaller inner_steps"
        )
    if settings.method != "dips" and not isinstance(settings.options.outer.lr, float | int):
        raise ConfigError(f"outer.lr: {settings.method} takes a number, got {settings.options.outer.lr!r}")
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
