"""Which options may be tuned, and into what."""

from __future__ import annotations

import pytest

from dips.errors import ConfigError
from dips.protocol.options import Clip, Options, OuterOptions, TunedOption
from dips.protocol.tunable import (
    MAY_BE_OFF,
    TUNABLE,
    complete_changes,
    describe_changes,
    restore_tuned,
    tune_options,
)

LARGE = {"outer.momentum": 0.95, "penalty.beta": 0.5}


@pytest.mark.parametrize("key", TUNABLE)
def test_every_key_changes_its_option_and_no_other(key: str) -> None:
    """Also twice in a row, and a restart from the file's options with all that was tuned gives the same."""
    value = LARGE.get(key, 7.0)
    kept = complete_changes((TunedOption(key, value),))
    tuned = tune_options(Options(), kept)
    name = key.rpartition(".")[2]
    found = tuned
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value and type(found) is type(value if name not in ("warmup_rounds", "gate_patience") else 7)
    assert tune_options(tuned, kept) == tuned


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (TunedOption("outer.lr", 0.0), "outer.lr: expected a number from 1e-09 to 1000"),
        (TunedOption("outer.lr", float("nan")), "expected a finite number"),
        (TunedOption("outer.lr", 0.0, off=True), "expected a number; only"),
        (TunedOption("outer.momentum", 1.0), "expected 0, or 1e-06 to 0.999999"),
        (TunedOption("penalty.beta", 1e-320), "penalty.beta: expected a number from 1e-06 to 1e+06, got 1e-320"),
        (TunedOption("outer.lr", 1e308), "outer.lr: expected a number from 1e-09 to 1000"),
        (TunedOption("penalty.warmup_rounds", 1.5), "expected a whole number"),
        (TunedOption("penalty.beta", 0.0), "penalty.beta: expected a number from 1e-06"),
        (TunedOption("penalty.hard_cap", 1.0), "penalty.hard_cap: expected a number above 1"),
        (TunedOption("penalty.warmup_rounds", 0.0), "penalty.warmup_rounds: expected a number from 1"),
        (TunedOption("outer.clip.norm", 0.0), "clip.norm: expected a number from 1e-30"),
        (TunedOption("timing.heartbeat_s", 1.0), "cannot be tuned while the run goes on"),
        (TunedOption("", 1.0), "cannot be tuned while the run goes on"),
    ],
)
def test_what_cannot_be_is_refused(change: TunedOption, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        tune_options(Options(), (change,))
    assert said in str(error.value)


def test_of_two_clips_one_holds() -> None:
    """To name one is to leave the other, in whatever order they are tuned."""
    first = complete_changes((TunedOption("outer.clip.relative", 2.0),))
    assert tune_options(Options(), first).outer.clip == Clip(relative=2.0)
    second = complete_changes((TunedOption("outer.clip.norm", 3.0),))
    merged = {change.key: change for change in (*first, *second)}
    assert tune_options(Options(), merged.values()).outer.clip == Clip(norm=3.0)
    both = (TunedOption("outer.clip.norm", 1.0), TunedOption("outer.clip.relative", 1.0))
    with pytest.raises(ConfigError):
        tune_options(Options(), complete_changes(both))


def test_a_key_stands_once() -> None:
    with pytest.raises(ConfigError, match="expected each key once"):
        complete_changes((TunedOption("outer.lr", 0.5), TunedOption("outer.lr", 0.6)))


def test_changes_are_spelled_as_they_are_typed() -> None:
    changes = (TunedOption("outer.lr", 0.5), TunedOption("timing.window_s", 0.0, off=True))
    assert describe_changes(changes) == "outer.lr=0.5 timing.window_s=off"
    assert TUNABLE.keys() >= MAY_BE_OFF


def test_what_a_ledger_has_tuned_and_cannot_be_is_left_out_and_said() -> None:
    """A master that did not start over it could not be told of a better number; the rest holds."""
    good, bad = TunedOption("outer.lr", 0.5), TunedOption("penalty.beta", 1e-320)
    options, held, said = restore_tuned(Options(), (bad, good))
    assert (options.outer.lr, options.penalty, held) == (0.5, Options().penalty, {"outer.lr": good})
    assert list(said) == ["penalty.beta"] and "dips set" in said["penalty.beta"]


def test_clips_are_restored_in_whatever_order_they_were_tuned() -> None:
    file = Options(outer=OuterOptions(clip=Clip(norm=1.0)))
    tuned = complete_changes((TunedOption("outer.clip.relative", 2.0),))
    for changes in (tuned, tuned[::-1]):
        options, held, said = restore_tuned(file, changes)
        assert options.outer.clip == Clip(relative=2.0) and list(held) == [c.key for c in changes] and not said
