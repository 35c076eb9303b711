"""OuterLoop over a real socket to a scripted agent, one rank, and slaves that are a function."""

from __future__ import annotations

import socket
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

from dips.client import OuterLoop
from dips.client.ipc import messages
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    Attached,
    ErrorReply,
    Noted,
    Over,
    PullMoved,
    PullNow,
    PullWanted,
    PushNow,
    PushWanted,
    Stepped,
    TrainOn,
)
from dips.client.rank import agent_client, joining, outer_loop, steps, transfer
from dips.client.rank.agent_client import JobCollectives
from dips.client.rank.model_checks import UNKNOWN
from dips.client.rank.outer_loop import OWN_STATES, find_loop
from dips.client.rank.shard_transfer import BackgroundTransfer, ShardTransfer, TransferRequest, TransferResult
from dips.client.rank.steps import OuterSteps
from dips.client.rank.transfer import TransferStats
from dips.codecs import Codec
from dips.config import load_cluster
from dips.dataclass import replace
from dips.errors import ConfigError, Diverged, LocalProtocolError, StaleIncarnation, UnavailableSlave
from dips.ids import GENESIS, VersionId
from dips.protocol.effects import Grant
from tests.unit.client.parallel.late_device import Meeting, ThreadRanks, run_ranks

V1, V2, V3 = VersionId(1, 1), VersionId(2, 2), VersionId(3, 3)


class ScriptedAgent:
    """Answers questions in the order of a script, and keeps every message but reports of progress."""

    def __init__(self, path: Path, *answers: Answer, connections: int = 1) -> None:
        self.messages: list[messages.Message] = []
        self._connections = connections  # one after the other
        self._answers = list(answers)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        for _ in range(self._connections):
            self._serve_connection()

    def _serve_connection(self) -> None:
        rank, _ = self._server.accept()
        with rank, rank.makefile("rb") as stream:
            while head := stream.read(messages.LENGTH.size):
                message = messages.decode_message(stream.read(messages.body_length(head)))
                if isinstance(message, messages.TransferProgress):
                    rank.sendall(messages.encode_message(Noted()))
                    continue
                self.messages.append(message)
                if not isinstance(message, messages.Notice):
                    rank.sendall(messages.encode_message(self._answers.pop(0)))

    def join(self) -> None:
        """Wait for the end of the connections, which the loops have closed."""
        self._thread.join(10)
        assert not self._thread.is_alive(), "a connection is open"
        self._server.close()


def pull_now(version: VersionId, seq: int) -> PullNow:
    return PullNow(1, seq, Grant(version, (), 60.0), 0.25)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    keys = {"shared": {"run": "r"}, "cluster": "c", "master": "127.0.0.1:1", "tls": False}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump({**keys, "directory": str(tmp_path)}))
    monkeypatch.setenv("DIPS_AGENT", f"unix:{tmp_path}/agent.sock")
    monkeypatch.delenv("DIPS_AGENT_HOME", raising=False)
    return tmp_path


def change_file(directory: Path, **keys: Any) -> Path:
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **keys}))
    return file


def test_nothing_is_trained_pushed_or_saved_on_a_torn_model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull that fails after its first fragment, and an agent that says to train on: every call names what to do."""

    def pull(grant: Any, base: Any, pieces: Any, **_: Any) -> TransferStats:
        for piece in pieces:
            piece.array[:] = float(grant.version.version)
        return TransferStats(0, 0.0, 1)

    def tear(moving: ShardTransfer, request: TransferRequest, *_: Any) -> BackgroundTransfer:
        return moving._move_nothing(request, result=TransferResult(False, "ps1 is gone", 0, torn=True))

    monkeypatch.setattr(transfer, "pull_pieces", pull)
    change_file(directory, shared={"run": "r", "data": {"ranges": 3}})
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), pull_now(V2, 2), TrainOn("", 1, 0.25))
    agent = ScriptedAgent(directory / "agent.sock", *script)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    outer = OuterLoop(model, directory / "cluster.yaml")
    assert outer.version == V1 and all(bool((p == 1.0).all()) for p in model.parameters())
    monkeypatch.setattr(ShardTransfer, "begin_pull", tear)
    outer.step(tokens=8, loss=torch.tensor(2.0))
    for call in (
        lambda: outer.step(tokens=8), lambda: next(outer.ranges()), lambda: outer.load_state_dict({}),
        outer.push, outer.pull, outer.install, outer.state_dict, outer.close,
    ):  # fmt: skip
        with pytest.raises(LocalProtocolError, match="the model is torn"):
            call()
    assert (outer.version, outer.inner_steps) == (V1, 1)
    outer.__exit__(LocalProtocolError, None, None)
    agent.join()
    stepped, wanted, moved = agent.messages[-3:]
    assert isinstance(stepped, Stepped) and isinstance(wanted, PushWanted)
    assert replace(stepped, ago_s=0.0) == Stepped(1, 8, 2.0)
    assert isinstance(moved, PullMoved) and (moved.installed, moved.torn, moved.seq) == (False, True, 2)


@pytest.mark.parametrize(
    ("fragments", "optimizer", "why"),
    [
        (2, lambda: None, "fragments need the optimizer itself instead of a function"),
        (3, None, "fragments: 3 is more than the 2 layers"),
    ],
)
def test_fragments_that_cannot_be_are_refused(directory: Path, fragments: int, optimizer: Any, why: str) -> None:
    """Before anything is pulled, with what to write instead."""
    file = directory / "cluster.yaml"
    keys = {**yaml.safe_load(file.read_text()), "install": "whole", "overlap": "full", "fragments": fragments}
    file.write_text(yaml.safe_dump(keys))
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(directory / "agent.sock"))
        agent.listen()
        with pytest.raises(ConfigError, match=why):
            OuterLoop(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), file, optimizer=optimizer)


def test_replicas_that_synchronise_by_themselves_need_training_to_pause(directory: Path) -> None:
    """A version that is merged beside training would come between two synchronisations."""
    with pytest.raises(ConfigError, match="may_push: expected overlap: none in the cluster file"):
        OuterLoop(nn.Linear(3, 2), change_file(directory, install="whole", overlap="full"), may_push=lambda: True)


@pytest.mark.parametrize(
    ("theirs", "alone", "why"),
    [
        ({}, False, ""),
        ({"overlap": "full"}, False, "overlap: none on rank 0, full on rank 1: the ranks of a job need the same"),
        ({"shared": {"run": "r", "codec": "int8"}}, False, "shared.codec: fp32 on rank 0, int8 on rank 1"),
        ({"max_restarts": 3, "log_level": "debug"}, False, ""),  # the agent's
        ({}, True, "trains alone: False on rank 0, True on rank 1"),
    ],
)
def test_ranks_of_different_cluster_files_are_told_so(
    directory: Path, theirs: dict[str, Any], alone: bool, why: str
) -> None:
    """As on two hosts with a file of their own, one of which was edited: both ranks end, and neither waits."""
    files = [load_cluster(change_file(directory)), load_cluster(change_file(directory, **theirs))]

    def compare(rank: int, meeting: Meeting) -> str:
        ranks: Any = ThreadRanks(rank, meeting)
        try:
            joining.compare_files(files[rank], alone and rank == 1, ranks)
        except ConfigError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, compare)
    assert first == second and first.startswith(why) and bool(first) == bool(why)


class UnreadLoss:
    """A loss that an accelerator never completes by itself."""

    ready = False

    def read(self) -> float:
        return 2.0

    def __float__(self) -> float:
        return 2.0


def test_no_message_overtakes_a_step(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast steps are held back, and go out before a remark, a checkpoint, a push and the end, each in its place."""
    monkeypatch.setattr(agent_client, "FLUSH_S", 1e6)
    monkeypatch.setattr(steps, "is_deferred", lambda loss: isinstance(loss, UnreadLoss))
    monkeypatch.setattr(steps, "DeferredScalar", lambda loss: loss)
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    saved = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0)
    train_on = TrainOn("", 1000, 0.25)
    script = (Attached(1, 0.0), pull_now(V1, 1), train_on, saved, train_on, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    with OuterLoop(nn.Linear(3, 2), directory / "cluster.yaml") as outer:
        outer.step(tokens=1)  # the first of all is no fast one
        outer.step(tokens=2, loss=1.0)
        outer.step(tokens=3, loss=2.0)
        outer.remark("look")
        outer.step(tokens=4, loss=UnreadLoss())  # read when it is needed
        outer.state_dict()
        outer.step(tokens=5)
        outer.push()
        outer.step(tokens=6, loss=UnreadLoss())
    agent.join()
    told = [
        (m.tokens, m.steps, m.loss, m.losses) if isinstance(m, Stepped) else type(m).__name__ for m in agent.messages
    ]
    told = told[told.index("PullMoved") + 1 :]
    assert told == [
        (1, 1, None, 0), (5, 2, 1.5, 2), "Remarked", (4, 1, 2.0, 1), "SaveWanted", (5, 1, None, 0), "PushWanted",
        (6, 1, 2.0, 1), "Detach",
    ]  # fmt: skip
    assert [m.demanded for m in agent.messages if isinstance(m, PushWanted)] == [True]


def test_a_pull_ends_what_was_before_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that wait for their loss are lost with the others and count for no later push, a push in flight is settled,
    and `on_version` gets the version before the model is trained on.
    """
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    monkeypatch.setattr(steps, "is_deferred", lambda loss: isinstance(loss, UnreadLoss))
    monkeypatch.setattr(steps, "DeferredScalar", lambda loss: loss)
    file = directory / "cluster.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "install": "whole", "overlap": "full"}))
    begin, slots = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25)), AskAgain("no slot", 100)
    script = (*begin, slots, TrainOn("", 100, 0.25), pull_now(V2, 2), Over("the target is reached", 1.0), Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    versions: list[VersionId] = []
    written: list[tuple[float, int]] = []
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        outer.on_version(versions.append)
        outer.log_to(lambda numbers, steps: written.append((numbers["dips/tokens"], steps)))
        outer.step(tokens=8, loss=UnreadLoss())
        assert outer.moving
        outer.step(tokens=16, loss=UnreadLoss())
        outer.pull()
        assert (outer.version, outer.moving, versions) == (V2, False, [V2])
        assert written == [(24.0, 2)]
        outer.pull()
        outer.push()
    agent.join()
    told = [m.tokens if isinstance(m, Stepped) else type(m) for m in agent.messages]
    assert told[3:] == [8, PushWanted, 16, PushWanted, PullWanted, PullMoved, messages.Detach], (
        "in a finished run nothing is asked"
    )


def test_a_pipelines_losses_are_told_before_a_push(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has them; what the push carries is the loss of its steps."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    monkeypatch.setattr(steps.LossChannel, "gather_losses", lambda _: (6.0, 2, True))
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), TrainOn("", 1000, 0.25), Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    with OuterLoop([nn.Linear(3, 2)], directory / "cluster.yaml") as outer:
        outer.step(tokens=8)
    agent.join()
    told = [type(message).__name__ for message in agent.messages][3:]
    assert told == ["Stepped", "LossReported", "PushWanted", "Detach"]


def test_a_planned_pipeline_finds_its_loop_and_reports(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its parts, also as modules of a module, while the loop is open; its pushes count once, when they are accepted;
    and what is reported arrives in order, after the steps before it.
    """
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    results = [messages.PushResult(1, seq, kind, "") for seq, kind in enumerate(("accepted", "gated", "accepted"))]
    settled = [TrainOn("", 1, 0.25, results[at]) for at in (0, 0, 1, 2)]
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), *settled, Noted())
    agent, counted = ScriptedAgent(directory / "agent.sock", *script), []
    parts, other = [nn.Linear(3, 2), nn.Linear(2, 2)], nn.Linear(3, 2)
    with OuterLoop(nn.ModuleList(parts), directory / "cluster.yaml") as outer:
        assert find_loop(parts) is find_loop(parts[1:]) is outer and find_loop([other]) is None
        for _ in settled:
            outer.step(tokens=8)
            counted.append(outer.accepted_pushes)
        stage = {"seconds": {"forward": 0.25}, "idle": {"border": 1}, "peak_bytes": {"gathered": 64}}
        outer.report_pipeline(gear=2, step_s=1, idle=0.5, stages=[stage])
        outer.report_change("plan", "it is another now", restarts=True)
    assert find_loop(parts) is None and counted == [1, 1, 1, 2]
    agent.join()
    assert agent.messages[-3:-1] == [
        messages.PipelineReported(1, 2, 1.0, 0.5, (messages.PlayedStage(**stage),)),
        messages.InsideChanged(1, "plan", "it is another now", restarts=True),
    ]


@pytest.mark.parametrize(("version", "begins"), [(GENESIS, 1.0), (V1, 0.01)])
def test_a_cluster_that_joins_a_run_under_way_warms_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, version: VersionId, begins: float
) -> None:
    """Its optimizer is empty: the learning rate rises over a hundred steps, and no further. A run's first cluster, and
    one that goes on from a checkpoint, begin with all of it.
    """
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    saved = messages.Saved("c", str(version), 0, False, 0, 0, (), 0.0, 0, (), 0)
    script = (Attached(1, 0.0), pull_now(version, 1), TrainOn("", 1000, 0.25), saved, messages.Resumed("", 1000))
    agent = ScriptedAgent(directory / "agent.sock", *script, Noted())
    with OuterLoop(nn.Linear(3, 2), directory / "cluster.yaml") as outer:
        state, seen = outer.state_dict(), list[float]()
        for _ in range(102):
            seen.append(outer.lr_scale)
            outer.step(tokens=1)
        assert seen == [pytest.approx(max(begins, min(1.0, step / 100))) for step in range(1, 103)]
        outer.load_state_dict(state)
        assert outer.lr_scale == 1.0
    agent.join()


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        ("none", "0.2 MB shard + 60.0 MB process = 60.2 MB"),
        ("full", "0.2 MB shard + 0.2 MB kept + 60.0 MB process = 60.5 MB"),
    ],
)
def test_the_host_memory_is_told(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overlap: str, expected: str
) -> None:
    """Once, with its parts, before a host runs out of it: what was pushed is kept only where a merge will need it."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1000, 0.25), Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    OuterLoop(nn.Linear(200, 300), change_file(directory, install="whole", overlap=overlap)).close()
    agent.join()
    told = f"OuterLoop: host memory beside the model, rank 0: {expected}\n"
    assert capsys.readouterr().err == told


def fill_with_version(grant: Grant, base: Any, pieces: Any, **_: Any) -> TransferStats:
    for piece in pieces:
        piece.array[:] = float(grant.version.version)
    return TransferStats(0, 0.0, 1)


@pytest.mark.parametrize("how", ["close", "install", "state_dict", "another loop", "on_version"])
def test_a_version_that_no_forward_has_read_is_complete(
    directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Under `install: lazy`: for whoever saves, evaluates or takes over the model next."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, install="lazy")
    saved = messages.Saved("c", str(V2), 0, False, 0, 0, (), 0.0, 0, (), 0)
    train_on, noted = TrainOn("", 1000, 0.25), Noted()
    ends = {"state_dict": (saved, noted), "another loop": (Attached(2, 0.0), train_on, noted)}.get(how, (noted,))
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), pull_now(V2, 2), train_on, *ends)
    agent = ScriptedAgent(directory / "agent.sock", *script, connections=1 + (how == "another loop"))
    model, seen = nn.Linear(3, 2), list[float]()

    def look(*_: object) -> None:
        seen.extend({float(element) for p in model.parameters() for element in p.detach().flatten()})

    outer = OuterLoop(model, file)
    model(torch.ones(1, 3))
    if how == "on_version":
        outer.on_version(look)
    outer.step(tokens=8)
    if how == "another loop":
        outer, former = replaced_loop(model, file, outer)
        assert not former._shard_transfer._memory.pending
    elif how != "on_version":
        with pytest.raises(LocalProtocolError, match="no module of the model was called in the step after it"):
            outer.step(tokens=8)
        getattr(outer, how)()
    look() if how != "on_version" else None
    assert seen == [2.0]
    outer.close()
    agent.join()


def replaced_loop(model: nn.Module, file: Path, former: OuterLoop) -> tuple[OuterLoop, OuterLoop]:
    """Another loop of the same model, whose agent has it train on with what it has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterSteps, "pull_newest", lambda self: setattr(self._state, "version", V2))
        return OuterLoop(model, file), former


@pytest.mark.parametrize("how", ["close", "another loop"])
def test_a_loop_that_ends_leaves_nothing_behind(directory: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A push in flight, which reads the host memory, the ranks' own process group, and the watch of the agent."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    began, ended = threading.Event(), list[str]()
    close = JobCollectives.close

    def push(*_: Any, cancel: threading.Event, **__: Any) -> TransferStats:
        began.set()
        assert cancel.wait(20)
        ended.append("push")
        raise UnavailableSlave("cancelled")

    def close_group(self: JobCollectives) -> None:
        ended.append("group")
        close(self)

    monkeypatch.setattr(transfer, "push_pieces", push)
    monkeypatch.setattr(JobCollectives, "close", close_group)
    monkeypatch.setattr(joining, "watch_run", lambda *_: lambda: ended.append("watch"))
    file, push_now = change_file(directory, install="whole", overlap="full"), PushNow(1, 2, Grant(V1, (), 60.0))
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), push_now)
    ends = (Noted(),) if how == "close" else (Attached(2, 0.0), Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script, *ends, connections=1 + (how == "another loop"))
    model = nn.Linear(3, 2)
    outer = OuterLoop(model, file)
    outer.step(tokens=8)
    assert outer.moving and began.wait(10)
    if how == "another loop":
        outer, _ = replaced_loop(model, file, outer)
    else:
        outer.close()
    assert ended == ["watch", "push", "group"]
    outer.close()
    agent.join()


def test_a_push_that_was_demanded_is_settled_before_the_end(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`push` and `close` at the end of a script under `overlap: full`: what was trained last counts, and `on_version`
    has the version.
    """
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    monkeypatch.setattr(transfer, "push_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    file, train_on = change_file(directory, install="whole", overlap="full"), TrainOn("", 1000, 0.25)
    push_now, slots = PushNow(1, 2, Grant(V1, (), 60.0)), AskAgain("no slot", 100)
    script = (Attached(1, 0.0), pull_now(V1, 1), train_on, slots, push_now, pull_now(V2, 2), train_on, Noted())
    agent, versions = ScriptedAgent(directory / "agent.sock", *script), list[VersionId]()
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        outer.on_version(versions.append)
        outer.step(tokens=8)
        outer.push()
        assert outer.moving and outer.version == V1
    agent.join()
    told = [type(message).__name__ for message in agent.messages][3:]
    assert told == ["Stepped", "PushWanted", "PushWanted", "PushMoved", "PullMoved", "Detach"]
    assert versions == [V2]


@pytest.mark.parametrize("overlap", ["none", "full"])
def test_a_push_that_was_given_up_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch, overlap: str) -> None:
    """With the reason, in the script's output and to the agent, and once: what was trained last did not get out."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file, train_on = change_file(directory, install="whole", overlap=overlap), TrainOn("", 1000, 0.25)
    given_up = TrainOn("all 2 slots are in use", 1000, 0.25, given_up=True)
    told = (AskAgain("no slot", 100), given_up) if overlap == "full" else (given_up, train_on)
    script = (Attached(1, 0.0), pull_now(V1, 1), train_on, *told, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    outer = OuterLoop(nn.Linear(3, 2), file)
    outer.step(tokens=8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        outer.push()
        if overlap == "none":
            outer.push()
        outer.close()
    agent.join()
    attach = agent.messages[0]
    assert isinstance(attach, messages.Attach) and attach.overlap == (overlap == "full")
    (remarked,) = [message.text for message in agent.messages if isinstance(message, messages.Remarked)]
    assert [str(warning.message) for warning in warned] == [f"OuterLoop: {remarked}"]
    assert "given up (all 2 slots are in use)" in remarked and "lost if the script ends" in remarked


def test_ranges_end_with_what_is_settled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose loss and tokens are still on an accelerator is told before the next range is asked for, and the
    version that comes at the end of the data is told, too. A loop that is closed has no more ranges.
    """
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    monkeypatch.setattr(steps, "is_deferred", lambda given: isinstance(given, UnreadLoss | torch.Tensor))
    monkeypatch.setattr(steps, "DeferredScalar", lambda loss: loss)
    file = change_file(directory, shared={"run": "r", "data": {"ranges": 3}})
    train_on, given = TrainOn("", 1000, 0.25), messages.RangeGiven
    unsettled, settled = (messages.RangesEnded("", False, left) for left in (True, False))
    script = (Attached(1, 0.0), pull_now(V1, 1), train_on, given(0), unsettled, pull_now(V2, 2), train_on, settled)
    agent = ScriptedAgent(directory / "agent.sock", *script, given(1), Noted())
    versions, tokens = list[VersionId](), list[float]()
    outer = OuterLoop(nn.Linear(3, 2), file)
    outer.on_version(versions.append)
    outer.log_to(lambda numbers, _: tokens.append(numbers["dips/tokens"]))
    for number in outer.ranges():
        assert number == 0
        outer.step(local_tokens=torch.tensor(16), loss=UnreadLoss())
    assert versions == [V2] and tokens == [16.0]
    ranges = outer.ranges()
    assert next(ranges) == 1
    outer.close()
    assert list(ranges) == []
    agent.join()
    told = [type(message).__name__ for message in agent.messages][3:]
    step, end = ["Stepped", "TokensCounted"], ["PushWanted", "PullMoved"]
    assert told == ["RangeWanted", *step, "RangeWanted", *end, *["RangeWanted"] * 2, "Detach"]


def test_each_outer_step_at_the_end_of_the_data_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push in flight and the one of the rest, or one that is tried again: each has an outcome and a version."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, shared={"run": "r", "data": {"ranges": 1}})
    unsettled, settled = (messages.RangesEnded("", False, left) for left in (True, False))
    accepted = [TrainOn("", 1, 0.25, messages.PushResult(1, seq, "accepted", "")) for seq in (2, 3)]
    script = (unsettled, pull_now(V2, 2), accepted[0], unsettled, pull_now(V3, 3), accepted[1], settled)
    agent = ScriptedAgent(
        directory / "agent.sock", Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25), *script, Noted()
    )
    versions = list[VersionId]()
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        outer.on_version(versions.append)
        assert list(outer.ranges()) == []
        assert (versions, outer.accepted_pushes) == ([V2, V3], 2)
    agent.join()


def test_ranges_go_on_in_a_run_that_is_extended_as_it_ends(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer ended for good, as at the end of the data. One whose end is told twice, and whose final version does
    not come, ends.
    """
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, shared={"run": "r", "data": {"ranges": 3}})
    train_on, over = TrainOn("", 1, 0.25), messages.RangesEnded("the run is finished with v1@r1", True)
    script = (over, train_on, messages.RangeGiven(0), over, train_on, over, train_on)
    agent = ScriptedAgent(directory / "agent.sock", Attached(1, 0.0), pull_now(V1, 1), train_on, *script, Noted())
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        assert list(outer.ranges()) == [0]
    agent.join()


def test_a_push_in_flight_at_the_end_of_the_data_is_settled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the agent is asked again: its outcome may return ranges."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    monkeypatch.setattr(transfer, "push_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    file = change_file(directory, install="whole", overlap="full", shared={"run": "r", "data": {"ranges": 1}})
    train_on, push_now = TrainOn("", 1, 0.25), PushNow(1, 2, Grant(V1, (), 60.0))
    unsettled, settled = (messages.RangesEnded("", False, left) for left in (True, False))
    script = (
        Attached(1, 0.0),
        pull_now(V1, 1),
        train_on,
        messages.RangeGiven(0),
        push_now,
        unsettled,
        train_on,
        settled,
    )
    agent = ScriptedAgent(directory / "agent.sock", *script, Noted())
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        for _ in outer.ranges():
            outer.step(tokens=8)
            assert outer.moving
        assert not outer.moving
    agent.join()
    told = [type(message).__name__ for message in agent.messages][3:]
    assert told == ["RangeWanted", "Stepped", "PushWanted", "RangeWanted", "PushMoved", "RangeWanted", "Detach"]


@pytest.mark.parametrize("policy", ["stop", "reset"])
def test_a_model_that_diverged_is_saved_only_where_a_reset_mends_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Elsewhere it would come over the last good checkpoint."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    saved = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0)
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1000, 0.25), *[saved] * (policy == "reset"), Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    model = nn.Linear(3, 2)
    with OuterLoop(model, change_file(directory, install="whole", on_divergence=policy)) as outer:
        torch.nn.init.constant_(model.weight, float("inf"))
        if policy == "reset":
            assert outer.state_dict()["base"] == str(V1)
        else:
            with pytest.raises(Diverged, match="it is not saved over the last good checkpoint"):
                outer.state_dict()
    agent.join()


@pytest.mark.parametrize("known", [True, False])
def test_a_reset_drops_the_optimizers_state_and_warms_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Moments that are not finite would make the next step diverge again; of an unknown optimizer they cannot go."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, install="whole", on_divergence="reset")
    push = PushNow(1, 2, Grant(GENESIS, (), 60.0))
    genesis, heal = pull_now(GENESIS, 1), (pull_now(V1, 3), TrainOn("", 1000, 0.25), Noted())
    agent = ScriptedAgent(directory / "agent.sock", Attached(1, 0.0), genesis, TrainOn("", 1, 0.25), push, *heal)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam((model if known else nn.Linear(3, 2)).parameters())
    outer = OuterLoop(model, file)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(float("nan"))
    assert outer.lr_scale == 1.0
    if known:
        outer.step(tokens=8)
        assert not optimizer.state and all(bool((p == 1.0).all()) for p in model.parameters())
        assert (outer.version, outer.lr_scale) == (V1, 0.01)
        outer.close()
    else:
        with pytest.raises(Diverged, match="a reset does not mend it: its optimizer is not known"):
            outer.step(tokens=8)
        outer.__exit__(Diverged, None, None)
    agent.join()


def test_a_script_that_fails_leaves_its_optimizer_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps are counted no more, and the agent sees the connection end without a word."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    agent = ScriptedAgent(directory / "agent.sock", Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1000, 0.25))
    model, counted = nn.Linear(3, 2), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train() -> None:
        with OuterLoop(model, directory / "cluster.yaml") as outer:
            outer.follow_optimizer(optimizer, tokens=lambda: counted.append(1) or 1)
            optimizer.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    optimizer.step()
    agent.join()
    assert counted == [1] and not any(isinstance(message, messages.Detach) for message in agent.messages)


def test_a_goodbye_that_is_refused_leaves_a_loop_as_it_was(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed again, as in a `finally`, it says the same; and another loop of this process can take its place."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    begin, refused = (pull_now(V1, 1), TrainOn("", 1000, 0.25)), ErrorReply("StaleIncarnation", "attempt 1 is over")
    script = (Attached(1, 0.0), *begin, refused, refused, Attached(2, 0.0), *begin, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script, connections=2)
    first = OuterLoop(nn.Linear(3, 2), directory / "cluster.yaml")
    for _ in range(2):
        with pytest.raises(StaleIncarnation, match="attempt 1 is over"):
            first.close()
    OuterLoop(nn.Linear(3, 2), directory / "cluster.yaml").close()
    agent.join()


@pytest.mark.parametrize(("closes", "torn"), [(True, False), (False, False), (False, True)])
def test_a_process_may_make_one_loop_after_another(
    directory: Path, monkeypatch: pytest.MonkeyPatch, closes: bool, torn: bool
) -> None:
    """Trainer.train() twice, or again after it ran out of memory: an attempt of its own, and the former one ends. Its
    host memory is free: there was twice the sum that is printed until the former loop was collected.
    """
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    begin = (pull_now(V1, 1), TrainOn("", 1000, 0.25))
    ends: list[Answer] = [Noted()] if closes else []
    script = (Attached(1, 0.0), *begin, *ends, Attached(2, 0.0), *begin, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script, connections=2)
    model = nn.Linear(3, 2)
    optimizer, counted = torch.optim.SGD(model.parameters(), 0.1), list[int]()

    def count_in(loop: int) -> int:
        counted.append(loop)
        return 1

    first = OuterLoop(model, directory / "cluster.yaml")
    first.follow_optimizer(optimizer, tokens=lambda: count_in(1))
    shard = weakref.ref(first._shard_transfer._memory._buffer.pieces[0].array)
    first._shard_transfer._memory.torn = torn  # by an install for which the device was full
    if closes:
        first.close()
    with OuterLoop(model, directory / "cluster.yaml") as second:
        assert shard() is None
        second.follow_optimizer(optimizer, tokens=lambda: count_in(2))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(LocalProtocolError, match="is closed" if closes else "gave way to another"):
            first.push()
    agent.join()
    assert counted == [2]
    attached = [m.process for m in agent.messages if isinstance(m, messages.Attach)]
    assert len(attached) == len(set(attached)) == 2
    assert [m.attempt for m in agent.messages if isinstance(m, Stepped)] == [2]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        ({"checksum": 1}, "the model does not hold what the checkpoint was saved with.*or what ranks owe .* another"),
        ({"owed.rank0": torch.zeros(1)}, "rank 0 expected 8 numbers of owed, got 1.*each rank must save its own"),
    ],
)
def test_a_checkpoint_that_does_not_count_is_told_and_pulled_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch, spoil: dict[str, Any], why: str
) -> None:
    """Before the agent resumes anything: an int8 run of which rank 0 alone saved would crash at every start. What is
    pulled is told to `on_version` before the model is trained on.
    """
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    file = directory / "cluster.yaml"
    keys = {**yaml.safe_load(file.read_text()), "install": "whole", "shared": {"run": "r", "codec": "int8"}}
    file.write_text(yaml.safe_dump(keys))
    saved = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0)
    again = (pull_now(V2, 2), TrainOn("", 1000, 0.25), Noted())
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1000, 0.25), saved, *again)
    agent = ScriptedAgent(directory / "agent.sock", *script)
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        versions = list[VersionId]()
        outer.on_version(versions.append)
        state = outer.state_dict()
        with pytest.warns(UserWarning, match=f"OuterLoop: .*{why}"):
            told = outer.load_state_dict({**state, **spoil})
        assert told.endswith("pulled v2@r2") and outer.version == V2 and versions == [V2]
    agent.join()
    assert [m.text for m in agent.messages if isinstance(m, messages.Remarked)] == [told]
    assert not any(isinstance(m, messages.Resume) for m in agent.messages)


class LoopRanks(ThreadRanks):
    """What an OuterLoop needs besides."""

    def barrier(self, call: str) -> None:
        assert set(self._meeting.exchange(self.rank, call)) == {call}

    def close(self) -> None:
        pass


def test_states_of_two_saves_are_told_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank overwrites its own file, and a crash comes between two of them: one rank pulled, and the other waited
    for it until `collective_s`.
    """
    here = threading.local()
    monkeypatch.setattr(outer_loop, "JobCollectives", lambda _: LoopRanks(here.rank, here.meeting))
    monkeypatch.setenv("DIPS_ALONE", "1")

    def play(rank: int, meeting: Meeting) -> str:
        here.rank, here.meeting = rank, meeting
        model = nn.Linear(3, 2)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        with OuterLoop(model) as outer:
            former = outer.state_dict()
            nn.init.zeros_(model.bias)
            present = outer.state_dict()
            return outer.load_state_dict(former if rank else present)

    with pytest.warns(UserWarning, match="the model does not hold what the checkpoint was saved with"):
        first, second = run_ranks(2, play)
    assert first == second and first.endswith("pulled v0@r0")


def test_a_checkpoint_brings_what_is_owed_and_is_no_news(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pushes rounded away is owed again; its version, an older one than was pulled, is not told as a new one."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, install="whole", shared={"run": "r", "codec": "int8"})
    saved, train_on = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0), TrainOn("", 1000, 0.25)
    script = (Attached(1, 0.0), pull_now(V2, 1), train_on, saved, messages.Resumed("", 1000), train_on, saved, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    versions = list[VersionId]()
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        outer.on_version(versions.append)
        state = outer.state_dict()
        state["owed.rank0"] = torch.arange(8.0)
        outer.load_state_dict(state)
        outer.push()
        assert outer.version == V1 and versions == []
        assert outer.state_dict()["owed.rank0"].tolist() == list(range(8))
    agent.join()


def test_a_checkpoint_knows_the_outcome_of_a_push_without_a_pull(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was accepted is owed no more, though no transfer has followed; the model contains its rounding errors."""

    def push_all(grant: Grant, base: Any, pieces: Any, *, encode: Any, **_: Any) -> TransferStats:
        for piece in pieces:
            encode(piece.range, piece.array.view(np.uint8).data)
        return TransferStats(0, 0.0, 1)

    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    monkeypatch.setattr(transfer, "push_pieces", push_all)
    file = change_file(directory, install="whole", shared={"run": "r", "codec": "int8"})
    saved, train_on = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0), TrainOn("", 1000, 0.25)
    push = PushNow(1, 2, Grant(V1, (), 60.0, Codec.INT8, V1))
    accepted = TrainOn("", 1000, 0.25, messages.PushResult(1, 2, "accepted", ""))
    resumed = saved, messages.Resumed("", 1000)
    script = (Attached(1, 0.0), pull_now(V1, 1), train_on, *resumed, push, accepted, saved, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        state = outer.state_dict()
        state["owed.rank0"] = torch.arange(8.0)
        outer.load_state_dict(state)
        outer.push()
        assert not outer.state_dict()["owed.rank0"].any()
    agent.join()


def test_that_each_rank_saves_its_own_is_told_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By rank 0 of several, and only if a rank has tensors of its own."""
    monkeypatch.setattr(transfer, "pull_pieces", fill_with_version)
    file = change_file(directory, install="whole", shared={"run": "r", "codec": "int8"})
    saved = messages.Saved("c", str(V1), 0, False, 0, 0, (), 0.0, 0, (), 0)
    script = (Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1000, 0.25), *[saved] * 4, Noted())
    agent = ScriptedAgent(directory / "agent.sock", *script)
    with OuterLoop(nn.Linear(3, 2), file) as outer:
        capsys.readouterr()
        outer.state_dict()
        assert capsys.readouterr().err == ""
        outer._collectives.world_size = 2
        outer.state_dict()
        outer.state_dict()
        assert capsys.readouterr().err == OWN_STATES
        outer._told_of_own, outer._collectives.rank = False, 1
        outer._tell_of_own()
        outer._told_of_own, outer._collectives.rank = False, 0
        monkeypatch.setattr(outer._shard_transfer, "checkpoint_tensors", lambda _: {})
        outer.state_dict()
        assert capsys.readouterr().err == ""
        outer._collectives.world_size = 1
    agent.join()


def take_steps(outer: OuterLoop) -> None:
    for _ in range(2):
        outer.step(local_tokens=4)


def test_buffers_that_train_and_are_not_shared_are_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first look after a step: a warning, and for `dips status`."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    script = (
        Attached(1, 0.0),
        pull_now(V1, 1),
        TrainOn("", 1, 0.25),
        TrainOn("", 1, 0.25),
        TrainOn("", 1, 0.25),
        Noted(),
    )
    agent = ScriptedAgent(directory / "agent.sock", *script)
    model = nn.BatchNorm1d(3)
    with OuterLoop(model, directory / "cluster.yaml") as outer:
        model(torch.randn(4, 3))
        with pytest.warns(
            UserWarning, match="running_mean, running_var: buffers that train and are not shared"
        ) as told:
            take_steps(outer)
        assert len(told) == 1
    agent.join()
    assert len([m for m in agent.messages if isinstance(m, messages.Remarked)]) == 1


def test_a_model_in_ddp_is_told_by_its_own_names(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen base has one digest, with DistributedDataParallel and without, and a shared buffer is known by its name;
    otherwise adapters of a job of one rank and of a job of two would be refused as of two bases.
    """
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    change_file(directory, shared={"run": "r", "share_buffers": ["1.running_*"]})
    digests = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for wrap in (nn.Module.train, nn.parallel.DistributedDataParallel):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
            model[0].requires_grad_(False)
            (directory / "agent.sock").unlink(missing_ok=True)
            script = (Attached(1, 0.0), pull_now(V1, 1), *[TrainOn("", 1, 0.25)] * 2, Noted())
            agent = ScriptedAgent(directory / "agent.sock", *script)
            wrapped = wrap(model)
            with OuterLoop(wrapped, directory / "cluster.yaml") as outer:
                wrapped(torch.randn(4, 3))
                outer.step(local_tokens=4)
            agent.join()
            assert not [m for m in agent.messages if isinstance(m, messages.Remarked)]
            digests += [m.frozen_digest for m in agent.messages if isinstance(m, messages.Attach)]
    finally:
        dist.destroy_process_group()
    assert digests[0] == digests[1] != UNKNOWN


@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_a_parameter_that_trains_and_is_not_shared_ends_the_job(
    directory: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Gradual unfreezing, or a layer more: before the next push; one that is frozen later is none."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    agent = ScriptedAgent(directory / "agent.sock", Attached(1, 0.0), pull_now(V1, 1), *[TrainOn("", 1, 0.25)] * 2)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[1].requires_grad_(False)
    outer = OuterLoop(torch.compile(model, backend="eager"), directory / "cluster.yaml")
    model[0].bias.requires_grad_(False)
    outer.step(local_tokens=4)
    model[1].requires_grad_(True) if how == "unfrozen" else model.append(nn.Linear(2, 2))
    expected = f"{1 if how == 'unfrozen' else 2}.bias: a parameter that was unfrozen or added"
    with pytest.raises(ConfigError, match=expected):
        outer.step(local_tokens=4)
    outer.__exit__(ConfigError, None, None)
    agent.join()


class SlowSgd(torch.optim.Optimizer):
    """Lookahead: slow weights in the state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(0.01)
            p.copy_(self.state[p].setdefault("slow_buffer", p.detach().clone()).lerp_(p, 0.5))


def test_an_optimizer_that_undoes_pulls_ends_the_job_before_its_first_push(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is not even asked whether a push is due."""
    monkeypatch.setattr(transfer, "pull_pieces", lambda *_, **__: TransferStats(0, 0.0, 1))
    agent = ScriptedAgent(directory / "agent.sock", Attached(1, 0.0), pull_now(V1, 1), TrainOn("", 1, 0.25))
    model = nn.Linear(8, 8)
    optimizer = SlowSgd(model.parameters())
    outer = OuterLoop(model, directory / "cluster.yaml")
    optimizer.step()
    with pytest.raises(ConfigError, match=r"weight: SlowSgd makes it from weights of its own \(state 'slow_buffer'\)"):
        outer.step(local_tokens=4)
    outer.__exit__(ConfigError, None, None)
    agent.join()
    assert not any(isinstance(message, PushWanted) for message in agent.messages)
