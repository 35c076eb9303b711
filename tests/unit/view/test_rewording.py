"""No code reads a sentence: with every reason in other words, what is shown and what is decided changes in the words
alone.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from rich.console import Console

from dips import errors
from dips.errors import DipsError, treatment_of
from dips.master.meters import RoundMeters
from dips.protocol import entities, enums
from dips.protocol.enums import ClusterCause, ClusterState, RemarkSubject, SlaveCause, SlaveState
from dips.protocol.view import (
    ClusterView,
    DurabilityView,
    JournalView,
    LeaseView,
    LedgerMirrorView,
    MirrorView,
    RollbackView,
    RunView,
    StandbyView,
    TrackView,
    VersionProcessView,
)
from dips.telemetry.exits import run_command
from dips.view import prometheus
from dips.view.judging import judge_run, read_view, spell_view
from dips.view.page.document import make_state
from dips.view.page.memory import LINES, PageMemory, describe_note
from dips.view.terminal import FittedStatus, one_line, render_status
from tests.simulation.trial import play
from tests.unit.view.views import HEARTBEAT_S, make_cluster, make_run, make_slave

OTHER = "zzz"
REASON = re.compile(r"reason|text|why|what|remark|flags|quarantine$|differs|lines|pace|untuned")


def reword(text: str) -> str:
    """Every word another, none where there was none."""
    return OTHER if text else ""


def every_state() -> Iterator[RunView]:
    """Each state of a peer with each cause that it may have, and all that can be wrong with a run."""
    causes = list(ClusterCause)
    for state in ClusterState:
        clusters = {f"c{i:02}": make_cluster(state, cause, f"{cause} as said") for i, cause in enumerate(causes)}
        yield make_run(clusters)
    for state_of_slave in SlaveState:
        yield make_run(
            slaves={f"s{i:02}": make_slave(state_of_slave, c, f"{c} is why") for i, c in enumerate(SlaveCause)}
        )
    for trainer in ("starting", "training", "dead"):
        yield make_run({subject.value: make_stalled(trainer, subject) for subject in RemarkSubject})
    yield make_run(
        {
            "gated": make_cluster(gated="norm 9 above 3"), "held": make_cluster(quarantined=True, quarantine="a look"),
            "odd": make_cluster(differs={"loss": "its loss is high"}, pace="aligned: H 10"),
        },
        {"full": make_slave(mirror=MirrorView("v1@r1", 2, 3.0, True, "no space left"))},
        durability=DurabilityView(state=enums.DurabilityState.DEGRADED, reason="disk full"),
        rollback=RollbackView(3, "waits for dips rollback"), untuned=("outer.lr: gone",), pace_warning="too short",
        ledger_mirror=LedgerMirrorView(True, 4, 5.0, "slow"),
        lease=LeaseView("a", True, 5.0, True, "503", (StandbyView("b", False, "no store"), StandbyView("c", True))),
        track=TrackView(("wandb",), True, "wandb: not there"),
        on_version=VersionProcessView(red=True, reason="exit code 1"), journal=JournalView(writing=False),
    )  # fmt: skip


def make_stalled(trainer: str, subject: RemarkSubject) -> ClusterView:
    return make_cluster(
        "idle", "stalled", "its trainer died", trainer=trainer, remarks={subject: f"{subject}: do this"}
    )


def reworded(value: Any, name: str = "") -> Any:
    """The same view with every sentence reworded, before anything is judged."""
    if isinstance(value, str):
        return reword(value) if type(value) is str and REASON.search(name) else value
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: reworded(getattr(value, f.name), f.name) for f in fields(value)})
    if isinstance(value, dict):
        return {key: reworded(item, name) for key, item in value.items()}
    return tuple(reworded(item, name) for item in value) if isinstance(value, tuple) else value


def without_words(shown: Any, name: str = "") -> Any:
    """A document without its sentences; that one is there, or none, stays."""
    if isinstance(shown, str):
        return bool(shown) if REASON.search(name) else shown
    if isinstance(shown, dict):
        return {key: without_words(item, key) for key, item in shown.items()}
    return [without_words(item, name) for item in shown] if isinstance(shown, list) else shown


VIEWS = list(every_state())
FRESH = [
    (before, judge_run(replace(reworded(before), concerns=()), {}, 0.0, HEARTBEAT_S)) for before in VIEWS
]  # judged anew from other words


def judged(view: RunView) -> list[Any]:
    peers = [*view.clusters.values(), *view.slaves.values()]
    return [(p.word, p.severity, bool(p.why)) for p in peers] + [(c.severity, c.who) for c in view.concerns]


@pytest.mark.parametrize(("before", "after"), FRESH)
def test_the_judgement_is_the_same(before: RunView, after: RunView) -> None:
    assert judged(after) == judged(before)


@pytest.mark.parametrize(("before", "after"), FRESH)
def test_the_page_is_the_same(before: RunView, after: RunView) -> None:
    shown = [make_state(view, PageMemory(), wall=1000.0) for view in (before, after)]
    assert without_words(shown[1]) == without_words(shown[0])
    assert json.dumps(shown[0]) != json.dumps(shown[1]) or before == after


@pytest.mark.parametrize(("before", "after"), FRESH)
def test_prometheus_is_the_same(before: RunView, after: RunView) -> None:
    assert scrape(after) == scrape(before)


def scrape(view: RunView) -> bytes:
    class Found(Collector):
        def collect(self) -> list[Metric]:
            return list(prometheus.collect({"view": view, "meters": RoundMeters(), "wall": 1000.0}))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found())
    return generate_latest(registry)


@pytest.mark.parametrize(("before", "after"), FRESH)
def test_the_terminal_is_the_same(before: RunView, after: RunView) -> None:
    """The same rows with the same cells in the same colours, and a line of prose where there was one."""
    assert cells(after) == cells(before)
    assert one_line(after) == one_line(before)
    FittedStatus(after)  # and it fits


def cells(view: RunView) -> list[str]:
    """What is drawn, colours too, without the prose under rows and behind colons."""
    out = io.StringIO()
    Console(file=out, width=400, force_terminal=True, color_system="truecolor").print(render_status(view))
    return [line for line in out.getvalue().splitlines() if not line.startswith(("\x1b[2m", "  ")) and ": " not in line]


def test_a_view_travels_whatever_its_words_are() -> None:
    for _, after in FRESH:
        assert judged(read_view(json.loads(spell_view(after)))) == judged(after)


@pytest.mark.parametrize("kind", [*LINES, "something_new"])
@pytest.mark.parametrize("cause", ["left", "silent"])
def test_an_event_is_as_grave_in_other_words(kind: str, cause: str) -> None:
    told = {"cluster": "west", "slave": "ps0", "push": "west/1#3", "cause": cause, "reason": "left"}
    before, after = describe_note(kind, told, 1.0), describe_note(kind, {**told, "reason": OTHER}, 1.0)
    assert before is not None and after is not None
    assert (after.severity, after.who) == (before.severity, before.who)


@pytest.mark.parametrize(
    "error", [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, DipsError)]
)
def test_an_error_ends_alike_in_other_words(
    error: type[DipsError], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code and advice are its class's; its message is passed on."""

    def end(message: str) -> tuple[object, list[str]]:
        def fail() -> None:
            raise error(message)

        with pytest.raises(SystemExit) as ended:
            run_command(fail)
        return ended.value.code, capsys.readouterr().err.splitlines()

    (code, said), (again, other) = end("dips.yaml: shared.outer.lr: expected a number, got 'x'"), end(OTHER)
    assert code == again == treatment_of(error("")).exit_code
    assert said[1:] == other[1:] and other[0] == f"error: {OTHER}"


@pytest.mark.parametrize("seed", [21, pytest.param(0, marks=pytest.mark.slow)])  # 21 is short
def test_a_run_goes_on_alike_in_other_words(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reasons of peers are in a simulated run with faults, the same happens in it."""
    before = play((seed, None))
    for peer in (entities.Cluster, entities.Slave):
        as_said: Any = peer.set_state
        monkeypatch.setattr(
            peer,
            "set_state",
            lambda self, state, cause, reason, now, said=as_said: said(self, state, cause, OTHER, now),
        )
    after = play((seed, None))
    assert before.failure is None and after.failure is None
    assert (after.events, after.faults, after.seen) == (before.events, before.faults, before.seen)
