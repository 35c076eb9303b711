"""Which options an operator may change while the run goes on, and how a change becomes options.

What is not in TUNABLE is agreed upon with others (heartbeats, codecs), or allocated at start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from math import isfinite
from typing import Any

from dips.errors import ConfigError
from dips.protocol.options import Options, TunedOption

TUNABLE: dict[str, str] = {  # what may be tuned → when it holds
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
TARGETS = {  # how far the run goes, which extension.py changes: key of the run file → field of options.Targets
    "stop.tokens": "tokens",
    "stop.versions": "versions",
    "stop.wall_s": "wall_s",
    "data.epochs": "epochs",
}
CLIPS = ("outer.clip.norm", "outer.clip.relative")
MAY_BE_OFF = frozenset({*CLIPS, "timing.window_s"})  # null in the files


def tune_options(options: Options, changes: Iterable[TunedOption]) -> Options:
    """Return the options with these changes; raise ConfigError on a key that is none, or a value that cannot be."""
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
) -> tuple[Options, dict[str, TunedOption], tuple[str, ...]]:
    """What a ledger holds of these, as it holds: (the options, what is tuned in them, why the rest is not).

    An older Di-PS took numbers that no judgement survives. A master that refused to start over them could not be told
    of better ones, so the file's hold.
    """
    known, held, refused = list(changes), set[str](), list[str]()
    for change in sorted(known, key=lambda change: not change.off):  # one clip is off before the other is named
        try:
            options = tune_options(options, (change,))
        except ConfigError as error:
            refused.append(f"{error}: the run file's holds, `dips set` sets another")
        else:
            held.add(change.key)
    return options, {change.key: change for change in known if change.key in held}, tuple(refused)


def complete_changes(changes: Sequence[TunedOption]) -> tuple[TunedOption, ...]:
    """The changes as they are kept: of two clips one at most holds, so to name one is to leave the other."""
    named = {change.key: change for change in changes}
    if len(named) != len(changes):
        raise ConfigError(f"expected each key once, got {describe_changes(changes):.200}")
    norm, relative = CLIPS
    for key, other in ((norm, relative), (relative, norm)):
        if key in named and not named[key].off and other not in named:
            named[other] = TunedOption(other, 0.0, off=True)
    return tuple(named.values())


def describe_changes(changes: Iterable[TunedOption]) -> str:
    """As the command line spells them."""
    return " ".join(f"{change.key}={'off' if change.off else f'{change.value:.15g}'}" for change in changes)


def current_values(options: Options) -> dict[str, float | str | None]:
    """What holds now, of everything that may be tuned."""
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
