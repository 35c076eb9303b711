"""Subcommands for an operator: replay a journal, repair a ledger that was restored from a backup."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dips.config import load_run
from dips.errors import ConfigError
from dips.ids import VersionId
from dips.master import recover
from dips.master.journal import Replayed, find_gaps, replay_journal
from dips.protocol.effects import Effect
from dips.protocol.events import Event

EXIT_DIFFERS = 1


def replay_command(
    journal: Annotated[Path, typer.Argument(help="A segment (journal-3-1.jsonl), or the master's directory: all.")],
    show: Annotated[bool, typer.Option("--show", help="Print every event and what it effected.")] = False,
) -> None:
    """Step a fresh Coordinator through a journal, and check that it decides the same again.

    A segment begins with the Coordinator's whole state, so each can be replayed alone. The first event whose effects
    are not those of the journal is shown with both. That happens when the deciding code has changed since (said, too),
    and is a bug of Di-PS when it has not. The master may be running; its newest segment ends where it was written.

    Exit codes: 0 the same effects; 1 they differ; 65 the file is no journal, or of a version that cannot be read;
    78 nothing is there.

    \b
    Example:
      dips-master replay master/
      dips-master replay master/journal-3-1.jsonl --show | less
    """
    done = replay_journal(journal, _show_step if show else lambda *_: None)
    for one in done:
        print(_replay_line(one))
    for gap in find_gaps(done):
        print(f"note: {gap}")
    if done[-1].differs:
        print(done[-1].differs)
        raise typer.Exit(EXIT_DIFFERS)


def _replay_line(one: Replayed) -> str:
    notes = [
        "other effects" if one.differs else "the same effects",
        "its last line is torn: the master was killed" if one.torn else "",
        "written by other deciding code" if one.other_code else "",
        one.raised,
    ]
    said = "; ".join(note for note in notes if note)
    return f"{one.path.name}: term {one.term}, {one.events} events, {one.effects} effects: {said}"


def _show_step(line: int, now: float, event: Event, effects: list[Effect]) -> None:
    print(f"{line:>7}  {now:.6f}  {event}")
    for effect in effects:
        print(f"         {effect}")


def recover_command(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run file of the run whose ledger was restored.")],
    term_above: Annotated[int, typer.Option(help="A term that was in use: from `dips status` or a slave's log.")] = 0,
    round_above: Annotated[int, typer.Option(help="A round that was in use: the number after @r of any version.")] = 0,
    adopt: Annotated[
        str | None, typer.Option(metavar="vN@rM", help="Go on from this newer version, which all slaves have.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make a ledger that was restored from a backup fit to serve again.

    A restored ledger knows less than slaves and clusters have seen, and would use names twice: terms, rounds,
    incarnations.
    So the master refuses to serve it. This brings its counters above everything that was ever sent: above what
    journals and snapshot directories on this machine and mirrors show, above --term-above and --round-above, and a
    thousand more, since not everything that was sent is written somewhere. It says what is lost, and asks.

    Lost are the outer steps since the backup. Their snapshots are no versions any more; slaves delete them when
    they are READY: copy what you want to keep. Clusters pull the head of the backup and go on. Data ranges that were
    trained since the backup are trained again.

    The snapshots of the backup's own time are mostly gone: slaves keep the newest. So a version that was made since,
    and that all slaves have (`dips verify` reads them through), may be adopted with --adopt: the run goes on from its
    parameters and momentum; lost is then only the account of who pushed what since, and its tokens.

    Stop the master, the slaves and the agents before, and start them after.

    Exit codes: 0 done; 1 you said no; 78 the ledger is in use, not there, or of another run.

    \b
    Example:
      cp /backup/ledger.sqlite master/ledger.sqlite
      dips-master recover --config dips.yaml --term-above 12 --round-above 4711
      dips-master recover --config dips.yaml --adopt v4650@r4711
    """
    run_file = load_run(config)
    with recover.open_ledger(run_file) as ledger:
        plan = recover.make_plan(run_file, ledger, term_above, round_above, _parse_version(adopt))
        print(plan.describe_lines())
        if not yes and not typer.confirm("Raise the counters and abandon what is named above?"):
            raise typer.Exit(1)
        plan.carry_out(ledger)
    print(f"done. next: dips-master --config {config}, then the slaves, then the agents")


def _parse_version(text: str | None) -> VersionId | None:
    try:
        return VersionId.parse(text) if text else None
    except ValueError as error:
        raise ConfigError(f"--adopt: {error}") from error
