"""`dips tune`: change options of the outer step, the gate and the deadlines while the run goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated

import typer

from dips.commands import operator
from dips.commands.completing import complete_change
from dips.commands.options import AS_JSON, CREDENTIALS, MASTER, WHOSE, find_master
from dips.protocol.effects import Refused
from dips.protocol.events import TuningAsked
from dips.protocol.options import TunedOption
from dips.protocol.tunable import MAY_BE_OFF, TUNABLE

OFF = "off"


def tune(
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE...", help="Keys as in the run file; none: show all.", autocompletion=complete_change
        ),
    ] = None,
    config: WHOSE = None,
    master: MASTER = None,
    credentials: CREDENTIALS = None,
    as_json: AS_JSON = False,
) -> None:
    """Change options while the run goes on: no restart, and no round is lost.

    The ledger keeps each change with who made it (`dips history --audit`), and each version's row the numbers that it
    was made with. The run file keeps what the run began with, and need not be edited. `off` is the file's null; of the
    two clips one at most holds. All other keys take a restart, or are agreed upon when a run is made.

    \b
    What may be tuned:
      outer.lr outer.momentum outer.clip.norm outer.clip.relative: from the next outer step
      penalty.beta .hard_cap .joiner_cap .warmup_rounds .gate_patience: from the next push
      timing.window_s: from the next window
      timing.compute_s .transfer_s .min_push_bps: from the next order or push

    Exit codes: 0 done; 1 refused; 2 no such key; 69 no master answers; 77 you are no operator; 78 such a value cannot
    be.

    \b
    Example:
      dips tune outer.lr=0.5 --config dips.yaml
      dips tune timing.window_s=30 penalty.beta=4 --config dips.yaml
    """
    peer = find_master(config, master, credentials)
    asked = tuple(parse_change(text) for text in changes or ())
    answer = asyncio.run(operator.ask_master(peer, "Tune", TuningAsked(0, asked)))
    if isinstance(answer, Refused):
        print(f"nothing done: {answer.reason}")
        raise typer.Exit(1)
    if as_json:
        print(json.dumps({change.key: None if change.off else change.value for change in answer.changes}))
        return
    named = {change.key for change in asked}
    for change in answer.changes:
        value = OFF if change.off else f"{change.value:.15g}"
        holds = TUNABLE[change.key] if change.key in named else "as tuned before"
        print(f"{change.key} = {value}, {holds}")
    if not answer.changes:
        print("nothing was tuned: all is as the run file says")


def parse_change(text: str) -> TunedOption:
    """`outer.lr=0.5`, `timing.window_s=off`; raise BadParameter on anything else."""
    key, equals, value = text.partition("=")
    if not equals or key not in TUNABLE:
        raise typer.BadParameter(f"expected KEY=VALUE with one of {', '.join(TUNABLE)}, got {text!r}")
    if value == OFF:
        if key not in MAY_BE_OFF:
            raise typer.BadParameter(f"{key} cannot be off; expected a number")
        return TunedOption(key, 0.0, off=True)
    try:
        return TunedOption(key, float(value))
    except ValueError as error:
        raise typer.BadParameter(f"{key}: expected a number{' or off' if key in MAY_BE_OFF else ''}") from error
