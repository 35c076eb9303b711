"""`keep_every`: every so many-th version stays on the disks beyond the newest two, the newest `keep_most` of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dips.errors import ConfigError, UnresponsiveSlave
from dips.ids import PullId, VersionId
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.durability import retire_versions
from dips.protocol.effects import Failed, Retire
from dips.protocol.options import Options, PenaltyOptions, TimingOptions
from dips.protocol.records import LedgerState, RunRow, ScoreHistory, VersionRow, VersionsRetired
from dips.protocol.run_state import RunState
from tests.unit.protocol.scripted_run import MANIFEST, ScriptedRun


def v(n: int) -> VersionId:
    return VersionId(n, n)


def kept_after(rounds: int, every: int, most: int) -> list[int]:
    """The versions that are not retired after so many rounds."""
    options = Options(
        penalty=PenaltyOptions(gates=()), timing=TimingOptions(window_s=0.0), keep_every=every, keep_most=most
    )
    run = ScriptedRun(options)
    run.train("a")
    for _ in range(rounds):
        run.push("a")
        run.wait(1.0)
        run.pull("a")
    assert run.head.version == rounds
    retired = {v.version for row in run.all_of(VersionsRetired) for v in row.versions}
    return [v for v in range(1, rounds + 1) if v not in retired]


@pytest.mark.parametrize(
    ("every", "most", "kept"),
    [
        (0, 0, [9, 10]),
        (3, 0, [3, 6, 9, 10]),
        (3, 2, [6, 9, 10]),
        (5, 1, [9, 10]),
        (4, 1, [8, 9, 10]),
        (1, 4, [7, 8, 9, 10]),
    ],
)
def test_every_nth_version_stays(every: int, most: int, kept: list[int]) -> None:
    """The newest two stay anyway; 0 keeps none besides, or all."""
    assert kept_after(10, every, most) == kept


@pytest.mark.parametrize(
    ("keep", "lacking", "retired", "gone"),
    [(1, 1, 0, [1, 2]), (2, 1, 0, [1]), (3, 1, 0, []), (2, 3, 0, []), (2, 1, 2, []), (9, 0, 0, [])],
)
def test_what_is_older_than_the_newest_few_goes_when_they_are_complete(
    keep: int, lacking: int, retired: int, gone: list[int]
) -> None:
    """As soon as just as many newer ones as stay are complete, not one later: neither one that some disk lacks counts,
    nor one that is about to be deleted.
    """
    rows = tuple(VersionRow(v(n), v(max(n - 1, 0)), n != lacking or not n, 0, n == retired > 0) for n in range(4))
    made = RunRow("r", "c", MANIFEST.to_json(), (("s", (0,)),), ("0" * 32,), (100.0,))
    state = LedgerState(made, 2, 4, rows, (), (), (), (), ScoreHistory((), ()), (), Intervals(), None)
    run = Coordinator(state, MANIFEST, Options(keep_snapshots=keep), 0.0).capture_state()
    assert isinstance(run, RunState)
    retire_versions(run)
    assert [version.version for row in run.out if isinstance(row, VersionsRetired) for version in row.versions] == gone


def test_a_negative_number_is_refused() -> None:
    """The message names the key."""
    with pytest.raises(ConfigError, match="keep_every"):
        Options(keep_every=-1)


def test_a_deletion_of_45_s_loses_no_slave() -> None:
    """Right after a flip nothing else is ordered: what disks delete meanwhile must not end every pull and push."""
    run = ScriptedRun()
    run.train("a")
    run.held.add(Retire)
    while not any(isinstance(order.body, Retire) for order in run.orders):
        push = run.push("a")
        run.wait(20)
        run.outcome(push)
    order = next(order for order in run.orders if isinstance(order.body, Retire))
    assert 2 * TimingOptions().order_s < 45
    for _ in range(int(45 / order.deadline_s)):
        run.now += order.deadline_s
        run.step(ev.OrderFailed("s", order.sinc, order.number, UnresponsiveSlave, "no answer"))
    assert run.view.slaves["s"].state == "ready"


def test_what_can_be_pulled_is_named() -> None:
    """Beside a version that cannot: those that every disk has, and that are not about to go."""
    run = ScriptedRun()
    run.train("a")
    for _ in range(3):
        run.outcome(run.push("a"))
    state = run.machine.capture_state()
    assert isinstance(state, RunState)
    v1, v2, v3 = (VersionId(n, n) for n in (1, 2, 3))
    state.versions[v1] = replace(state.versions[v1], durable=True, retired=True)
    state.versions[v3] = replace(state.versions[v3], durable=False)
    refused = run.ask(ev.PullRequested(0, PullId("a", run.inc("a"), 9), 1, v1))
    assert isinstance(refused, Failed) and str(refused.message).endswith(
        f"no longer on its disks; the slaves keep {v2}"
    )
