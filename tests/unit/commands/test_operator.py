"""What an operator's command does with each answer of the master. tests/integration/test_operator.py has whole runs."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dips import cli
from dips.client import version_pull
from dips.commands import operator
from dips.commands.operator import RETRY_S, TRIES
from dips.errors import Busy, ConfigError, UnavailableMaster
from dips.ids import VersionId
from dips.protocol.effects import Acknowledged, Extended, Pending, Refused, Tuned
from dips.protocol.events import (
    DrainAllAsked,
    DrainAsked,
    ExtensionAsked,
    FinaliseAsked,
    ReadmissionAsked,
    RollbackAsked,
    TargetChange,
    TuningAsked,
)
from dips.protocol.manifest import Manifest
from dips.protocol.options import Targets, TunedOption
from dips.protocol.tunable import TUNABLE
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire.generated.status_pb2 import StatusReply
from tests.run_files import write_run_file

MASTER = ("--master", "127.0.0.1:1")
ENDPOINT = Endpoint("the master", "127.0.0.1:1")
DONE, AWAY = Acknowledged(), UnavailableMaster("nobody answers")


class Operator:
    """Types commands that get these answers, while a clock goes on by what they sleep."""

    def __init__(self) -> None:
        self.answers, self.asked, self.slept, self.now = list[Any](), list[Any](), list[float](), 0.0
        self.view: Any = None

    async def ask_master(self, master: Endpoint, question: Any) -> Any:
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ask_view(self, master: Endpoint) -> Any:
        return self.view

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def type(self, *words: str, answers: tuple[Any, ...] = (), code: int = 0) -> str:
        """Return what the command printed; it takes all answers, and no other."""
        self.answers, self.asked, self.slept, self.now = list(answers), [], [], 0.0
        done = CliRunner().invoke(cli.cli, words)
        assert done.exit_code == code, done.output + repr(done.exception)
        assert not self.answers
        return done.stdout


@pytest.fixture(name="ops")
def answered(monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator()
    monkeypatch.setattr(operator, "ask_master", made.ask_master)
    monkeypatch.setattr(operator, "ask_view", made.ask_view)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=made.sleep)
    monkeypatch.setattr(operator, "time", clock)
    return made


def test_options_and_targets_are_set_by_one_command(ops: Operator) -> None:
    """Targets first; a refusal of them sets nothing else. Without a word the options are only shown."""
    goal = Extended(Targets(tokens=5), None)
    tuned = (TunedOption("outer.lr", 0.5), TunedOption("timing.window_s", 30.0))
    said = ops.type("set", "outer.lr=0.5", "stop.tokens=5", *MASTER, answers=(goal, Tuned(tuned)))
    assert ops.asked == [
        ExtensionAsked(0, (TargetChange("tokens", 5.0),)), TuningAsked(0, (TunedOption("outer.lr", 0.5),)),
    ]  # fmt: skip
    assert "goes on until 5 tokens" in said and "timing.window_s = 30, as set before" in said
    assert "outer.lr = 0.5, as set before" not in said and "outer.lr = 0.5, " in said
    assert "nothing done: it is over" in ops.type(
        "set", "outer.lr=0.5", "stop.tokens=5", *MASTER, answers=(Refused(0.0, "it is over"),), code=1
    )
    ops.type("set", "stop.tokens=5", *MASTER, answers=(goal,))
    assert "nothing was set: all is as the run file says" in ops.type("set", *MASTER, answers=(Tuned(()),))
    assert ops.asked == [TuningAsked(0, ())]


def test_json_is_all_that_a_script_reads(ops: Operator) -> None:
    """The sentence about targets stood before it, or in its place: no script could read that."""
    goal, tuned = Extended(Targets(tokens=5), VersionId(5, 6)), Tuned((TunedOption("outer.lr", 0.5),))
    for words in (("stop.tokens=5", "outer.lr=0.5"), ("stop.tokens=5",)):
        assert json.loads(ops.type("set", *words, "--json", *MASTER, answers=(goal, tuned))) == {"outer.lr": 0.5}
    for words, answers in (
        (["outer.lr=9"], (Refused(0.0, "too large"),)),
        (["stop.tokens=1"], (Refused(0.0, "it is past"),)),
    ):
        assert ops.type("set", *words, "--json", *MASTER, answers=answers, code=1) == ""


def test_an_option_may_be_off_and_a_finished_run_goes_on(ops: Operator) -> None:
    """Only where the file could have null; every key and when it takes effect stands in the help."""
    off = (TunedOption("outer.clip.norm", 0.0, off=True),)
    said = ops.type("set", "outer.clip.norm=off", *MASTER, answers=(Tuned(off),))
    assert ops.asked == [TuningAsked(0, off)] and "outer.clip.norm = off, " in said
    ops.type("set", "outer.clip.norm=2", *MASTER, answers=(Tuned(()),))
    assert ops.asked == [TuningAsked(0, (TunedOption("outer.clip.norm", 2.0),))]
    for wrong in ("outer.lr=off", "outer.clip.norm=on", "outer.lr", "outer.momentun=1", "outer.lr:1"):
        ops.type("set", wrong, *MASTER, code=2)
        assert not ops.asked, wrong
    resumed = Extended(Targets(versions=9), VersionId(5, 6))
    said = ops.type("set", "stop.versions=9", *MASTER, answers=(resumed,))
    assert "it was finished at v5@r6, and goes on from there" in said
    assert "finished" not in ops.type("set", "stop.versions=9", *MASTER, answers=(Extended(Targets(versions=9), None),))
    shown = " ".join(ops.type("set", "--help").split())
    assert all(key in shown for key in TUNABLE) and all(moment in shown for moment in TUNABLE.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("set", "outer.lr=-1"), "outer.lr: expected a number from 0 to "),
        (("set", "outer.lr=nan"), "outer.lr: expected a number from 0 to "),
        (("set", "stop.tokens=1e17"), "stop.tokens: expected a number from 0 to "),
        (("cluster", "quarantine", "my cluster"), "cluster name 'my cluster' is not usable"),
        (("cluster", "readmit", "my cluster"), "cluster name 'my cluster' is not usable"),
        (("drain", "slave/0"), "slave name 'slave/0' is not usable"),
        (("rollback", f"v{1 << 53}@r1"), "expected one as `dips history` names it"),
    ],
)
def test_what_cannot_be_is_the_operators_to_correct(ops: Operator, words: tuple[str, ...], told: str) -> None:
    """It was told as a broken protocol, `the peer is at fault: see its log`, or as a bug of Di-PS, without the key."""
    error = CliRunner().invoke(cli.cli, [*words, *MASTER]).exception
    assert isinstance(error, ConfigError) and told in str(error) and not ops.asked


def test_what_is_waited_for_is_shown(ops: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason of the last answer."""
    lines = list[str]()

    class Line:
        def __init__(self, **_: Any) -> None: ...

        def status(self, text: str) -> Any:
            lines.append(text)
            return nullcontext(SimpleNamespace(update=lines.append))

    monkeypatch.setattr(operator, "Console", Line)
    ops.answers = [Pending("ps0 writes v3@r3"), Pending("ps1 writes v3@r3"), DONE]
    assert operator._wait_until(ENDPOINT, DrainAllAsked(0), 60.0, "draining") is DONE
    assert lines == ["draining", "draining: ps0 writes v3@r3", "draining: ps1 writes v3@r3"]


def test_stop_is_asked_again_while_versions_are_made(ops: Operator) -> None:
    """Each time with twice as many more; not for ever, and not of a run that has ended."""
    ops.view = SimpleNamespace(head_version=VersionId(7, 9), head="v7@r9", finished=None)
    passed = Refused(0.0, "8 are made")
    said = ops.type("stop", *MASTER, answers=(passed, passed, Extended(Targets(versions=11), None)))
    assert [question.changes[0].value for question in ops.asked] == [8.0, 9.0, 11.0] and "ends with version 11" in said
    assert "nothing done: 8 are made" in ops.type("stop", *MASTER, answers=(passed,) * TRIES, code=1)
    ops.view.finished = "v7@r9"
    assert "the run has ended at v7@r9" in ops.type("stop", *MASTER)


def test_a_question_is_asked_until_it_is_answered_or_the_time_is_over(ops: Operator) -> None:
    """A rollback, a drain, and one of all slaves."""
    waits = Pending("s1 has not reported")
    said = ops.type("rollback", "v3@r4", *MASTER, answers=(waits, waits, DONE))
    assert "v3@r4 is the head" in said and ops.slept == [0.5, 0.5]
    assert ops.asked == [RollbackAsked(0, VersionId(3, 4))] * 3
    late = ("rollback", "v3@r4", "--wait-s", "1", *MASTER)
    assert "not rolled back: s1 has not reported" in ops.type(*late, answers=(waits,) * 3, code=1)
    assert ops.now == 1.0, "the time is over at its end, not a question later"
    assert "not drained: it does not serve" in ops.type(
        "drain", "s0", *MASTER, answers=(Refused(0.0, "it does not serve"),), code=1
    )
    assert "s0 is drained" in ops.type("drain", "s0", *MASTER, answers=(DONE,)) and ops.asked == [DrainAsked(0, "s0")]
    assert "all slaves are" in ops.type("drain", "--all", *MASTER, answers=(DONE,)) and ops.asked == [DrainAllAsked(0)]


def test_an_upgrade_is_finalised_once(ops: Operator) -> None:
    ops.view = SimpleNamespace(protocol=3, protocol_newest=4)
    assert "the run speaks 4" in ops.type("finalise", *MASTER, answers=(DONE,)) and ops.asked == [FinaliseAsked(0, 4)]
    assert "nothing done: s0 speaks 3" in ops.type("finalise", *MASTER, answers=(Refused(0.0, "s0 speaks 3"),), code=1)
    ops.view.protocol = 4
    assert "nothing to finalise: the run speaks 4" in ops.type("finalise", *MASTER) and not ops.asked


def test_a_cluster_that_is_not_quarantined_is_not_readmitted(ops: Operator) -> None:
    refused = Refused(0.0, "west is not quarantined")
    assert "nothing done" in ops.type("cluster", "readmit", "west", *MASTER, answers=(refused,), code=1)
    assert ops.asked == [ReadmissionAsked(0, "west")]


# ---- whose master it is ----------------------------------------------------------------------------------------------


def test_the_master_of_another_run_is_asked_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In plain text, where two runs of one machine have the address of `dips new`: `dips stop` ended the other run, and
    `dips follow` wrote its model.
    """
    asked = list[str]()

    async def call_method(method: Any, request: Any, **_: Any) -> Any:
        asked.append(type(request).__name__)
        return StatusReply(json='{"run": "q"}')

    async def describe_run(master: Endpoint) -> dict[str, Any]:
        return {"run": "q", "manifest": Manifest(()).to_json()}

    monkeypatch.setattr(control, "call_method", call_method)
    monkeypatch.setattr(version_pull, "_describe_run", describe_run)
    run_file = str(write_run_file(tmp_path, ["s0"]))
    for words in (("set", "outer.lr=0.5"), ("stop",), ("drain", "s0", "--self"), ("follow", "-o", str(tmp_path / "o"))):
        error = CliRunner().invoke(cli.cli, [*words, "--config", run_file]).exception
        assert isinstance(error, ConfigError) and "serves run 'q', the run file is of 'r'" in str(error), words
    assert set(asked) == {"StatusRequest"}


# ---- a slave drains itself -------------------------------------------------------------------------------------------


@pytest.fixture(name="own")
def words_of_itself(tmp_path: Path) -> tuple[str, ...]:
    return ("drain", "s0", "--self", "--config", str(write_run_file(tmp_path, ["s0"])))


def test_a_slave_asks_until_it_may_end(ops: Operator, own: tuple[str, ...]) -> None:
    """A master that is away is asked again after a second; each new reason is told once, as a log has it."""
    round_open = Pending("a round is open")
    said = ops.type(*own, answers=(AWAY, AWAY, TimeoutError(), round_open, round_open, Busy("full"), AWAY, DONE))
    assert said.splitlines() == [
        "waits: nobody answers", "waits: the master at 127.0.0.1:1 did not answer in time", "waits: a round is open",
        "waits: full", "waits: nobody answers", "s0 may be stopped: drained",
    ]  # fmt: skip
    assert ops.slept == [RETRY_S] * 5
    assert "s0 may be stopped: it does not serve" in ops.type(*own, answers=(Refused(0.0, "it does not serve"),))


def test_a_slave_ends_with_its_time(ops: Operator, own: tuple[str, ...]) -> None:
    """The last pause is as long as what is left, and none is negative: a hook that outlives its time is killed."""
    said = ops.type(*own, "--wait-s", "2.5", answers=(AWAY, AWAY, AWAY), code=1)
    assert ops.slept == [1.0, 1.0, 0.5] and said.endswith("not drained within 2.5 s: nobody answers\n")
    assert "not drained" in ops.type(*own, "--wait-s", "0", answers=(AWAY,), code=1) and ops.slept == [0.0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("drain",), "give a SLAVE or --all, one of them"),
        (("drain", "s0", "--all", *MASTER), "give a SLAVE or --all, one of them"),
        (("drain", "--all", "--self", "--config", "dips.yaml"), "--self: expected the SLAVE"),
        (("drain", "s0", "--self"), "--self: expected --config"),
        (("drain", "s0", "--self", "--config", "dips.yaml", *MASTER), "--self: expected --config"),
        (("drain", "s0", "--self", "--config", "dips.yaml", "--credentials", "a.crt"), "--self: expected --config"),
    ],
)
def test_who_drains_whom_is_clear(ops: Operator, words: tuple[str, ...], told: str) -> None:
    """Before any file is read and anybody is asked."""
    error = CliRunner().invoke(cli.cli, words).exception
    assert isinstance(error, ConfigError) and told in str(error) and not ops.asked
