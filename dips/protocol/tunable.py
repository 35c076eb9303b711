"""Options that an operator may change in a running run, and the conversion of changes to options.

Options that are not in TUNABLE are agreed upon with other processes (heartbeats, codecs), or allocated at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from math import isfinite
from typing import Any

from dips.errors import ConfigError
from dips.protocol.options import Options, TunedOption

TUNABLE: dict[str, str] = {  # tunable option → when a change takes effect
    "outer.lr": "from the next Apply",
    "outer.momentum": "from the next Apply",
    "outer.clip.norm": "from the next Apply",
    "outer.clip.relative": "from the next Apply",
    "penalty.beta": "from the next push that is measured",
    "penalty.hard_cap": "from the next push that is measured",
    "penalty.joiner_cap": "from the next push that is measured",
    "penalty.warmup_rounds": "from the next warm-up",
    "penalty.gate_patience": "from the next push that is gated",
    "timing.window_s": "from the next window",
    "timing.compute_s": "from the next order",
    "timing.transfer_s": "from the next transfer",
    "timing.min_push_bps": "at once",
}
TARGETS = {  # how far the run goes, key of the run file → field of options.Targets
    "stop.tokens": "tokens",
    "stop.versions": "versions",
    "stop.wall_s": "wall_s",
    "data.epochs": "epochs",
}
CLIPS = ("outer.clip.norm", "outer.clip.relative")
MAY_BE_OFF = frozenset({*CLIPS, "timing.window_s"})  # null in the files


def tune_options(options: Options, changes: Iterable[TunedOption]) -> Options:
    """Return the options with these changes; raise ConfigError on an unknown key or an impossible value."""
    sections: dict[str, dict[str, Any]] = {}
    for change in changes:
        if change.key not in TUNABLE:
            raise ConfigError(
                f"{change.key:.80}: cannot be tuned while the run goes on; expected one of {', '.join(TUNABLE)}"
            )
        section, _, name = change.key.rpartition(".")
        sections.setdefault(section, {})[name] = _read_value(options, change)
    if (clip := sections.pop("outer.clip", None)) is not None:
        sections.setdefault("outer", {})["clip"] = replace(options.outer.clip, **clip)
    return replace(options, **{key: replace(getattr(options, key), **values) for key, values in sections.items()})


def restore_tuned(
    options: Options, changes: Iterable[TunedOption]
) -> tuple[Options, dict[str, TunedOption], dict[str, str]]:
    """Apply the changes that a ledger holds; return (options, applied changes, why others were not), by key.

    A change that is refused today may be in an older ledger. The master starts all the same, with the value of the run
    file, so that an operator can set a better one.
    """
    known, held, refused = list(changes), set[str](), dict[str, str]()
    for change in sorted(known, key=lambda change: not change.off):  # one clip is off before the other is set
        try:
            options = tune_options(options, (change,))
        except ConfigError as error:
            said = describe_changes((change,))
            refused[change.key] = f"{said}: {error}: the run file's holds, `dips set` sets another"
        else:
            held.add(change.key)
    return options, {change.key: change for change in known if change.key in held}, refused


def complete_changes(changes: Sequence[TunedOption]) -> tuple[TunedOption, ...]:
    """Return the changes in the form that is kept: setting one of the two clips turns the other off."""
    named = {change.key: change for change in changes}
    if len(named) != len(changes):
        raise ConfigError(f"expected each key once, got {describe_changes(changes):.200}")
    norm, relative = CLIPS
    for key, other in ((norm, relative), (relative, norm)):
        if key in named and not named[key].off and other not in named:
            named[other] = TunedOption(other, 0.0, off=True)
    return tuple(named.values())


def describe_changes(changes: Iterable[TunedOption]) -> str:
    """Format changes as on the command line."""
    return " ".join(f"{change.key}={'off' if change.off else f'{change.value:.15g}'}" for change in changes)


def current_values(options: Options) -> dict[str, float | str | None]:
    """Return the present values of all tunable options."""
    return {key: _value_of(options, key) for key in TUNABLE}


def _value_of(options: Options, key: str) -> Any:
    at: Any = options
    for name in key.split("."):
        at = getattr(at, name)
    return at


def _read_value(options: Options, change: TunedOption) -> float | int | None:
    if change.off:
        if change.key not in MAY_BE_OFF:
            raise ConfigError(f"{change.key}: expected a number; only {', '.join(sorted(MAY_BE_OFF))} may be off")
        return None
    if not isfinite(change.value):
        raise ConfigError(f"{change.key}: expected a finite number, got {change.value}")
    if not _is_count(options, change.key):
        return change.value
    if change.value != int(change.value):
        raise ConfigError(f"{change.key}: expected a whole number, got {change.value:g}")
    return int(change.value)


def _is_count(options: Options, key: str) -> bool:
    """Whether the option is a whole number, by its type in options.py."""
    section, _, name = key.rpartition(".")
    owner = _value_of(options, section)
    assert is_dataclass(owner)
    return next(field.type for field in fields(owner) if field.name == name) in (int, "int")
