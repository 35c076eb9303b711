"""The command `dips set`: changes options and targets of a running run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dips.commands import operator
from dips.commands.completing import complete_change
from dips.commands.options import AS_JSON, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Extended, Refused
from dips.protocol.events import ExtensionAsked, TargetChange, TuningAsked
from dips.protocol.options import TunedOption
from dips.protocol.tunable import MAY_BE_OFF, TARGETS, TUNABLE
from dips.transport.endpoints import Endpoint

OFF = "off"


def set_options(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...", help="Keys as in the run file; default show all.", autocompletion=complete_change
        ),
    ] = None,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    as_json: AS_JSON = False,
) -> None:
    """Change options, or the targets of a run, while it runs: without a restart or a lost round.

    The ledger records each change and its author (`dips history --audit`), and for each version the values that it
    was made with. The run file keeps the initial values, and need not be edited. `off` is the file's null; of the
    two clips only one can be set. All other keys need a restart, or are fixed when a run is made.

    Targets (stop.*, data.epochs) are totals; clusters learn them within a heartbeat, and `outer.progress` and learning
    rates then follow the new target. A smaller target is accepted if it is not yet reached; 0 means no end by that
    measure. A finished run continues from its last version: start dips-client again on each cluster.

    \b
    Keys:
      stop.tokens stop.versions stop.wall_s data.epochs: at once
      TUNABLE

    Exit codes: 0 done; 1 refused; 2 no such key; 69 no master answers; 77 you are no operator; 78 the value is
    not possible.

    \b
    Example:
      dips set outer.lr=0.5 --config dips.yaml
      dips set stop.tokens=2000000000 --config dips.yaml
      dips set timing.window_s=30 penalty.beta=4 --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    targets, tuned = _split_changes(changes or ())
    if targets:
        _print_targets(_ask(peer, ExtensionAsked(0, targets)))
    if tuned or not targets:
        _print_tuned(_ask(peer, TuningAsked(0, tuned)).changes, {change.key for change in tuned}, as_json)


def _list_tunable() -> str:
    """Format TUNABLE for the help: keys that take effect at the same moment share a line."""
    moments: dict[str, list[str]] = {}
    for key, moment in TUNABLE.items():
        moments.setdefault(moment, []).append(key)
    return "\n".join(f"      {' '.join(keys)}: {moment}" for moment, keys in moments.items())


set_options.__doc__ = (set_options.__doc__ or "").replace("      TUNABLE", _list_tunable())


def _split_changes(changes: Sequence[str]) -> tuple[tuple[TargetChange, ...], tuple[TunedOption, ...]]:
    targets, tuned = list[TargetChange](), list[TunedOption]()
    for text in changes:
        key, equals, value = text.partition("=")
        if not equals or key not in {**TUNABLE, **TARGETS}:
            raise typer.BadParameter(f"expected KEY=VALUE with one of {', '.join([*TARGETS, *TUNABLE])}, got {text!r}")
        if key in TARGETS:
            targets.append(TargetChange(TARGETS[key], _read_number(key, value)))
        elif value == OFF and key in MAY_BE_OFF:
            tuned.append(TunedOption(key, 0.0, off=True))
        else:
            tuned.append(TunedOption(key, _read_number(key, value)))
    return tuple(targets), tuple(tuned)


def _read_number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{key}: expected a number{' or off' if key in MAY_BE_OFF else ''}") from error


def _ask(master: Endpoint, question: ExtensionAsked | TuningAsked) -> Any:
    answer = asyncio.run(operator.ask_master(master, question))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    return answer


def _print_targets(answer: Extended) -> None:
    print(f"the run goes on until {answer.targets.describe()}")
    if answer.resumed is not None:
        print(f"it was finished at {answer.resumed}, and goes on from there: start dips-client again on each cluster")


def _print_tuned(changes: Sequence[TunedOption], named: set[str], as_json: bool) -> None:
    """Print all keys that were ever tuned, with their present values."""
    if as_json:
        print(json.dumps({change.key: None if change.off else change.value for change in changes}))
        return
    for change in changes:
        value = OFF if change.off else f"{change.value:.15g}"
        print(f"{change.key} = {value}, {TUNABLE[change.key] if change.key in named else 'as set before'}")
    if not changes:
        print("nothing was set: all is as the run file says")
