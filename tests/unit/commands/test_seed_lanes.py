"""The loop of `dips seed` and `dips recover`: what it does with each answer of the master."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from safetensors.numpy import save_file
from typer.testing import CliRunner

from dips.cli import cli
from dips.client.preflight import peers
from dips.client.rank.transfer import TransferCancelled, TransferRate
from dips.commands import operator, seed_lanes, status
from dips.commands.seed_lanes import ASK_S, MOST_DROPS, ModelLanes, SeedTransfer, SeedWatch, await_master
from dips.errors import Busy, ConfigError, UnavailableMaster, UnavailableSlave
from dips.ids import PushId, VersionId
from dips.master import genesis
from dips.protocol.effects import Acknowledged, Dropped, Grant, Pending, Refused, SeedGranted, SlaveAddress
from dips.protocol.enums import LayerUnit
from dips.protocol.events import RecoverAsked, SeedAsked
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.transport.endpoints import Endpoint
from tests.unit.view.views import make_run, make_slave

MASTER = Endpoint("the master", "127.0.0.1:1")
LAYERS = Manifest((Layer("l", (Parameter("w", (4,)),)),))
SEED = SeedAsked(0, "", ("0" * 32,))
BEGUN, DONE, WAITS = Refused(0.0, "the run has begun"), Acknowledged(), Pending("s1 starts")
AWAY, FULL = UnavailableMaster("nobody answers"), Busy("too many calls at once")
SETTLED = "the transfer of the last grant has ended"
WAIT_S = 9.0


def granted(seq: int) -> SeedGranted:
    return SeedGranted(PushId("seed", 1, seq), Grant(VersionId(0, 0), (), 1.0))


class ScriptedTransfer:
    """A transfer whose questions get these answers; a function, or SETTLED, is awaited before the next one is read.
    The lanes are `moves`, called in a thread for each grant with what cancels it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Any, moves: Callable[..., None]) -> None:
        self.questions, self.waits, self.slept, self.now = list[Any](), list[str](), list[float](), 0.0
        self.pieces = dict[int, list[float]]()
        self._answers, self._moves, self._settled = list(answers), moves, False
        monkeypatch.setattr(operator, "ask_master", self._answer)
        monkeypatch.setattr(status, "ask_status", self._answer)
        monkeypatch.setattr(seed_lanes, "push_pieces", self._push)
        monkeypatch.setattr(seed_lanes.asyncio, "sleep", self._sleep)
        monkeypatch.setattr(seed_lanes, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.rates = list[TransferRate]()
        self.watch = SeedWatch(self.rates.append, self.waits.append)
        lanes = ModelLanes(MASTER, "r", LAYERS, {"w": np.zeros(4, np.float32)})
        self.transfer = SeedTransfer(lanes, self.watch, WAIT_S, lambda: self.now)

    def bring(self, question: SeedAsked | RecoverAsked = SEED, settled: bool = False) -> None:
        """`settled`: each transfer ends before the next question."""
        self._settled = settled
        asyncio.run(self.transfer.bring_model(question))
        assert not self._answers

    async def settle(self) -> None:
        assert self.transfer._moving is not None
        await asyncio.wait([self.transfer._moving.task])

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await (self.settle() if self._settled and self.transfer._moving is not None else let_others_run())

    async def _answer(self, master: Endpoint, question: Any = None) -> Any:
        self.questions.append(question)
        while callable(answer := self._answers.pop(0)) or answer is SETTLED:
            await (self.settle() if answer is SETTLED else answer())
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _push(
        self, grant: Grant, _: object, pieces: Any, *, cancel: threading.Event, progress: Any, **__: object
    ) -> None:
        self.pieces = {piece.layer: piece.array.tolist() for piece in pieces}
        self._moves(cancel, progress)


async def let_others_run() -> None:
    await asyncio.wait([asyncio.create_task(nothing())])


async def nothing() -> None:
    pass


def at_once(cancel: threading.Event, progress: object) -> None:
    pass


def breaks(cancel: threading.Event, progress: object) -> None:
    raise UnavailableSlave("s0 is gone")


def test_a_run_that_has_begun_without_us_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours has moved, or it broke: whoever called learns that this model was not taken."""
    with pytest.raises(ConfigError, match="the run has begun"):
        ScriptedTransfer(monkeypatch, BEGUN, moves=at_once).bring()
    script = ScriptedTransfer(monkeypatch, granted(1), SETTLED, BEGUN, moves=breaks)
    with pytest.raises(ConfigError, match="the run has begun"):
        script.bring()


def test_a_run_that_begins_with_what_we_moved_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slaves had all bytes and began before the next question. To a saved model a refusal is one all the same."""
    for question, refused in ((SEED, False), (RecoverAsked(0, "", ("0" * 32,), "m"), True)):
        script = ScriptedTransfer(monkeypatch, granted(1), SETTLED, BEGUN, moves=at_once)
        if refused:
            with pytest.raises(ConfigError, match="the run has begun"):
                script.bring(question)
        else:
            script.bring(question)


def test_a_transfer_that_broke_is_given_up_at_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, until a master that was away has heard it; then it is forgotten, and another may be granted."""
    script = ScriptedTransfer(monkeypatch, granted(7), AWAY, WAITS, WAITS, DONE, moves=breaks)
    script.bring(settled=True)
    assert [question.given_up for question in script.questions] == [0, 7, 7, 0, 0]
    assert script.waits.count("begins anew: s0 is gone") == 1 and "nobody answers" in script.waits
    assert len({(question.seeder, question.keys) for question in script.questions}) == 1


def test_what_is_dropped_granted_anew_or_done_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer moves at a time; the same grant again leaves it alone; none is left behind."""
    cancels, over, overlapped = list[threading.Event](), list[int](), False

    def until_cancelled(cancel: threading.Event, progress: object) -> None:
        nonlocal overlapped
        overlapped |= len(over) < len(cancels)
        cancels.append(cancel)
        assert cancel.wait(20)
        for _ in range(5):  # a moment in which the next one could begin
            overlapped |= threading.Event().wait(0.01) or cancels[-1] is not cancel
        over.append(1)
        raise TransferCancelled("cancelled")

    def started(count: int) -> Callable[[], Awaitable[None]]:
        async def look() -> None:
            while len(cancels) < count:
                await let_others_run()
            assert [cancel.is_set() for cancel in cancels] == [True] * (count - 1) + [False]

        return look

    async def dropped() -> None:
        assert all(cancel.is_set() for cancel in cancels) and len(over) == len(cancels)

    answers = (
        granted(1),
        started(1),
        granted(1),
        started(1),
        granted(2),
        started(2),
        Dropped("a slave was lost"),
        dropped,
    )
    script = ScriptedTransfer(monkeypatch, *answers, granted(3), started(3), DONE, moves=until_cancelled)
    script.bring()
    assert len(cancels) == len(over) == 3 and all(cancel.is_set() for cancel in cancels) and not overlapped
    assert script.transfer._moving is None and script.waits == ["begins anew: a slave was lost"]
    assert all(question.given_up == 0 for question in script.questions)
    assert script.slept == [ASK_S] * 5, "a pause between two questions"


def test_it_gives_up_after_some_drops(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ScriptedTransfer(monkeypatch, *[Dropped("the disk of s0 is full")] * MOST_DROPS, moves=at_once)
    with pytest.raises(UnavailableSlave, match=f"given up after {MOST_DROPS} attempts, the last one: the disk of s0"):
        script.bring()
    assert len(script.questions) == MOST_DROPS


@pytest.mark.parametrize(("answer", "error"), [(WAITS, UnavailableSlave), (AWAY, UnavailableMaster), (FULL, Busy)])
def test_it_waits_as_long_as_told(monkeypatch: pytest.MonkeyPatch, answer: Any, error: type[Exception]) -> None:
    """From the last bytes on; a rate of 0 is none, but for the last bytes of all. A master that is asked too much at
    once, as after its restart, ended it.
    """

    def moves(cancel: threading.Event, progress: Callable[[TransferRate], None]) -> None:
        for now, rate in ((2.0, TransferRate(10, 100, 5.0)), (4.0, TransferRate(10, 100, 0.0))):
            script.now = now
            progress(rate)

    def done(cancel: threading.Event, progress: Callable[[TransferRate], None]) -> None:
        moves(cancel, progress)
        progress(TransferRate(100, 100, 0.0))

    for move, since in ((moves, 2.0), (done, 4.0)):
        script = ScriptedTransfer(monkeypatch, granted(1), SETTLED, *[answer] * 20, moves=move)
        with pytest.raises(error):
            script.bring()
        assert script.now == since + WAIT_S + ASK_S
        assert [rate.nbytes for rate in script.rates] == [10, 10, 100][: len(script.rates)] and len(script.rates) >= 2


def test_the_master_is_awaited_as_long_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first answer is taken; each time nobody answers is told."""
    script = ScriptedTransfer(monkeypatch, AWAY, FULL, {"run": "r"}, moves=at_once)
    assert asyncio.run(await_master(MASTER, script.watch, WAIT_S)) == {"run": "r"}
    assert script.waits == ["nobody answers", "too many calls at once"] and script.slept == [ASK_S] * 2
    script = ScriptedTransfer(monkeypatch, *[AWAY] * 20, moves=at_once)
    with pytest.raises(UnavailableMaster):
        asyncio.run(await_master(MASTER, script.watch, WAIT_S))
    assert script.now == WAIT_S


def test_ctrl_c_ends_the_wait_for_a_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one: it was swallowed, and the command asked on."""

    async def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().call_soon(task.cancel)

    script = ScriptedTransfer(monkeypatch, cancel, AWAY, {"run": "r"}, moves=at_once)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(await_master(MASTER, script.watch, WAIT_S))


# ---- dips recover ----------------------------------------------------------------------------------------------------

SAVED = {f"layers.{i}.w": np.full(4, float(i), np.float32) for i in range(2)}


@pytest.fixture(name="recover")
def answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Types `dips recover` for a run of the saved model, whose second slave has lost its disk."""
    save_file(SAVED, tmp_path / "saved.safetensors")
    manifest = genesis.manifest_of(SAVED, Grouping(LayerUnit.BLOCK, ()))
    described = {"run": "r", "shared": {"layers": "block", "share_buffers": []}, "manifest": manifest.to_json()}

    async def describe(master: Endpoint) -> dict[str, Any]:
        return described

    async def ask_view(master: Endpoint) -> Any:
        slaves = {
            "s0": make_slave(reason="serves v8@r9"),
            "s1": make_slave("awaited", "unregistered", "its disk is empty"),
        }
        return make_run(head="v8@r9", slaves=slaves)

    monkeypatch.setattr(peers, "describe_run", describe)
    monkeypatch.setattr(status, "ask_view", ask_view)

    def type_recover(*words: str, model: str = "saved", said: str = "") -> Result:
        command = ["recover", "--master", "127.0.0.1:1", "--model", str(tmp_path / f"{model}.safetensors"), *words]
        return CliRunner().invoke(cli, command, input=said)

    return type_recover


def test_a_saved_model_is_brought_once_somebody_agrees(
    recover: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who lacks what is told before; a no changes nothing, which is exit code 1."""
    script = ScriptedTransfer(monkeypatch, moves=at_once)
    declined = recover(said="n\n")
    assert declined.exit_code == 1 and not script.questions
    assert "the head is v8@r9" in declined.stdout and "s1: its disk is empty" in declined.stdout
    assert "s0" not in declined.stdout
    lacks = SlaveAddress("s1", 1, (), (1,))
    made = SeedGranted(PushId("seed", 1, 1), Grant(VersionId(9, 11), (lacks,), 1.0))

    async def moved() -> None:
        while not script.pieces:
            await let_others_run()

    script = ScriptedTransfer(monkeypatch, made, moved, DONE, moves=at_once)
    done = recover("--yes")
    assert done.exit_code == 0 and "done: v9@r11 is the head" in done.stdout, repr(done.exception)
    first, second = script.questions
    assert script.pieces == {1: [1.0] * 4}, "what the other slave has is not sent"
    manifest = genesis.manifest_of(SAVED, Grouping(LayerUnit.BLOCK, ()))
    assert first.digests == tuple(genesis.layer_digest(layer, SAVED) for layer in manifest.layers)
    assert (first.version, second.version) == (None, VersionId(9, 11)) and first.source == "saved.safetensors"


def test_another_model_is_not_brought(recover: Callable[..., Result], tmp_path: Path) -> None:
    """Before anybody is asked whether it should."""
    save_file({"layers.0.w": np.zeros(5, np.float32)}, tmp_path / "other.safetensors")
    error = recover("--yes", model="other").exception
    assert isinstance(error, ConfigError) and "this is not the run's model: " in str(error)
