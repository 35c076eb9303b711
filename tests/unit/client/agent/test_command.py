"""The training command's end when its agent is told to end: it has `end_grace_s` to save what it has."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import structlog

from dips.client.agent import agent, restarts, trainer
from dips.client.agent.agent import END_GRACE_S, AgentSignals, CommandRunner, mark_level
from dips.client.agent.launch import CANNOT_START
from dips.client.agent.state import Actions, RecordMark
from dips.client.agent.trainer import TrainerProcess
from tests.unit.client.agent.play import Play

SAVES = """
import pathlib, signal, sys, time
begun, saved, seconds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), float(sys.argv[3])
def save(*_):
    time.sleep(seconds)
    saved.touch()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
begun.touch()
while True:
    time.sleep(60)
"""


@pytest.mark.parametrize(("seconds", "grace_s", "code"), [(0.2, 60.0, 0), (60.0, 0.2, 137)])
def test_a_trainer_has_its_grace_to_save(tmp_path: Path, seconds: float, grace_s: float, code: int) -> None:
    """SIGTERM first; killed only after the cluster file's time."""
    begun, saved = tmp_path / "begun", tmp_path / "saved"

    async def end() -> int:
        words = [sys.executable, "-c", SAVES, str(begun), str(saved), str(seconds)]
        process = await TrainerProcess.start(words, {})
        while not begun.exists():
            await asyncio.sleep(0.01)
        signals = AgentSignals()
        signals.terminated.set()
        unused: Any = None
        return await CommandRunner(unused, unused, signals, unused)._wait_or_end(process, grace_s)

    assert asyncio.run(end()) == code
    assert saved.exists() == (code == 0)


def test_the_default_grace_is_that_of_a_large_checkpoint() -> None:
    """Minutes: who ends the agent sooner says so itself."""
    assert END_GRACE_S >= 120


def test_a_crash_is_told_once_and_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch that crashes is one remark. What a process that SIGKILL ended wrote before is not its cause."""
    monkeypatch.setattr(trainer, "list_descendants", lambda root: [])  # the other children of pytest
    monkeypatch.setattr(restarts, "RESTART_PAUSE_S", 0.0)
    told = list[str]()

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            told.append(f"{event} {fields}")

        error = warning

    def perform(actions: Actions) -> None:
        told.extend(f"{a.kind} {a.fields}" for a in actions if isinstance(a, RecordMark))

    runner = CommandRunner(Play(max_restarts=1).core, perform, AgentSignals(), Log(), 1.0)
    assert asyncio.run(runner.run(["sh", "-c", "echo row 7 is read >&2; kill -9 $$"], {})) == 137
    crashes = [line for line in told if "killed by SIGKILL" in line]
    assert len(crashes) == 2 and "crashing, 1 of 1" in crashes[0] and "crashed too often: 2 times" in crashes[1], told
    assert not any("row 7" in line for line in told), told


@pytest.mark.parametrize(
    ("kind", "fields", "level"),
    [
        ("push_end", {"ok": True}, "debug"),
        ("push_end", {"ok": False}, "info"),
        ("pull_begin", {}, "debug"),
        ("joined", {"incarnation": 1}, "info"),
        ("remark", {"text": "half of the tokens"}, "warning"),
        ("inner", {"step": 7}, ""),
    ],
)
def test_the_log_says_at_its_usual_level_what_is_not_routine(kind: str, fields: dict[str, Any], level: str) -> None:
    """Each outer step's marks are there with `log_level: debug`, and those of a step that failed always."""
    assert mark_level(kind, fields) == level


def test_what_a_launch_leaves_is_killed_and_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parents first; one that was no child of ours is no error."""
    read, write = os.pipe()
    words = ["sh", "-c", "sleep 60 & echo $!; wait"]
    parent = os.posix_spawnp("sh", words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)])
    os.close(write)
    with open(read) as said:
        child = int(said.readline())
    listed = trainer.list_descendants
    assert listed(parent) == [child]
    assert not trainer._is_reaped(child), "it lives, and its parent is to reap it"
    alive = lambda pid: Path(f"/proc/{pid}").exists()  # noqa: E731
    monkeypatch.setattr(trainer, "list_descendants", lambda root: [p for p in (parent, *listed(parent)) if alive(p)])
    assert asyncio.run(trainer.kill_leftovers(lambda left: False)) == [parent, child]
    assert not alive(parent) and trainer._is_reaped(parent), "reaped, and that is known later, too"
    until = time.monotonic() + 10
    with suppress(FileNotFoundError):  # init has reaped it
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < until


async def test_what_has_ended_is_reaped_while_the_trainer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process that a script had left stayed as a zombie for weeks, until the host or container had no number."""
    orphan = os.posix_spawnp("true", ["true"], os.environ)
    launch = await trainer.CommandLaunch.start(["sh", "-c", "sleep 0.2; exit 3"], {})
    monkeypatch.setattr(trainer, "ORPHANS_S", 0.02)
    assert await launch.wait() == 3
    with pytest.raises(ChildProcessError):
        os.waitpid(orphan, os.WNOHANG)


async def test_a_command_that_is_not_there_says_so_and_one_without_its_agent_does_not_begin() -> None:
    """An operator who mistyped the command would have met a number alone; a trainer of no agent would never end."""
    launch = await trainer.CommandLaunch.start(["pyhton", "train.py"], {})
    assert await launch.wait() == CANNOT_START
    assert await launch.find_cause() == "error: cannot start 'pyhton': No such file or directory"
    words = [sys.executable, "-m", "dips.client.agent.launch", "1", "--", "echo", "begun"]
    late = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (late.returncode, late.stdout) == (128 + signal.SIGTERM, "")


def test_a_process_whose_name_is_no_text_does_not_end_the_agent(tmp_path: Path) -> None:
    """Anyone's on this host: Linux cuts names after 15 bytes, in the middle of a character, too."""
    named = os.fsencode(tmp_path) + b"/\xc3"
    os.symlink(b"/bin/sh", named)
    read, write = os.pipe()
    said, say = os.pipe()
    duplicates = [(os.POSIX_SPAWN_DUP2, read, 0), (os.POSIX_SPAWN_DUP2, say, 1)]
    strange = os.posix_spawn(named, ["sh", "-c", "echo; read line"], os.environ, file_actions=duplicates)
    try:
        os.read(said, 1)  # it has its name
        assert Path(f"/proc/{strange}/comm").read_bytes() == b"\xc3\n"
        assert strange in trainer.list_descendants(os.getpid())
    finally:
        for end in (read, write, said, say):
            os.close(end)
        os.kill(strange, 9), os.waitpid(strange, 0)


FORBIDDEN = """
import asyncio, os
from dips.client.agent import trainer
if os.getuid() == 0:
    os.setuid(65534)
told = []
trainer.list_descendants, trainer.UNDEAD_S = lambda root: [1], 0.0  # the first process is root's
asyncio.run(trainer.kill_leftovers(lambda left: told.append(left) is None))
print(told)
"""


def test_a_process_of_another_user_does_not_end_the_agent() -> None:
    """What a training command has started by sudo may not be killed: the operator is told, and the agent goes on."""
    done = subprocess.run([sys.executable, "-c", FORBIDDEN], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[[1]]\n", 0), done.stderr


async def test_a_process_that_the_kernel_does_not_end_holds_up_the_trainer_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that waits for a device: the loop goes on, the operator is told, and an agent that is to end ends."""
    read, write = os.pipe()  # what hangs: SIGKILL ends nothing until it is closed
    hangs = os.posix_spawnp("cat", ["cat"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)])
    os.close(read)
    os.set_inheritable(write, False)
    monkeypatch.setattr(trainer, "list_descendants", lambda root: [hangs])
    monkeypatch.setattr(trainer.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(trainer, "UNDEAD_S", 0.1)
    play, told, signals, told_at = Play(), list[tuple[str, object]](), AgentSignals(), list[float]()

    class Log:
        def warning(self, event: str, pids: list[int], **fields: object) -> None:
            told.append((event, pids))
            told_at.append(time.monotonic())
            if len(told) == 2:
                signals.terminated.set()

    unused: Any = None
    runner = CommandRunner(play.core, unused, signals, Log(), start=unused)
    launch, goes_on = await trainer.CommandLaunch.start(["true"], {}), asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, goes_on.set)
    try:
        async with asyncio.timeout(10):
            assert await launch.kill_leftovers(runner._give_up_leftovers) == 1
        assert goes_on.is_set(), "the loop did something else meanwhile"
        assert told == [("processes of the trainer do not end", [hangs])] * 2
        assert told_at[1] - told_at[0] > 0.09, "each time after UNDEAD_S"
    finally:
        os.close(write)
        os.waitpid(hangs, 0)
        await launch.wait()


class Simulated:
    """A launch that ends when the test says so, or when it is told to."""

    pid = 7

    def __init__(self, lines: tuple[str, ...] = (), ends: int | None = None) -> None:
        self.lines, self.told = lines, list[str]()
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if ends is not None:
            self.code.set_result(ends)

    async def wait(self) -> int:
        return await asyncio.shield(self.code)

    async def end_within(self, grace_s: float) -> int:
        self.told.append(f"end within {grace_s:g} s")
        return 143

    def last_lines(self, most: int) -> tuple[str, ...]:
        return self.lines[-most:]

    async def kill_leftovers(self, give_up: Callable[[Sequence[int]], bool]) -> int:
        self.told.append("kill leftovers")
        return 3

    async def find_cause(self) -> str:
        return ""


def runner_of(play: Play, *launches: Simulated) -> tuple[CommandRunner, AgentSignals, list[Any]]:
    """A runner of these launches, one after the other; what it starts and performs."""
    left, did, signals = list(launches), list[Any](), AgentSignals()

    async def start(command: Any, environment: Any) -> Simulated:
        did.append(("start", environment))
        return left.pop(0)

    def perform(actions: Actions) -> None:
        play.do(actions)
        did.extend((a.kind, a.fields) for a in actions if isinstance(a, RecordMark))

    return CommandRunner(play.core, perform, signals, structlog.get_logger(), 60.0, start), signals, did


async def test_a_launch_is_on_the_timeline_from_its_start_to_what_it_left() -> None:
    """Its attempt ends with it, whatever rank 0's connection does; a crash at the end is told with the last words."""
    play = Play()
    play.begin()
    launch = Simulated(("ValueError: x",), ends=1)
    runner, _, did = runner_of(play, launch)
    assert await runner.run(["train"], {"A": "b"}) == 1
    assert did[0] == ("start", {"A": "b", "DIPS_ATTEMPT": "1"})
    assert did[1] == ("trainer_start", {"attempt": 1, "pid": 7})
    assert ("trainer_end", {"attempt": 1, "code": 1, "killed": 3}) in did and launch.told == ["kill leftovers"]
    assert dict(play.marks)["trainer_gone"]["reason"] == "the trainer ended with exit code 1"
    assert runner.last_lines() == ("ValueError: x",)


async def test_what_is_remarked_at_the_end_is_on_the_timeline() -> None:
    """The command ended well and brought nothing: the agent's last act is to say so."""
    play = Play()
    play.begin()
    runner, _, did = runner_of(play, Simulated(ends=0))
    assert await runner.run(["train"], {}) == 0
    assert did[-1][0] == "remark" and "without one accepted push" in did[-1][1]["text"]


async def test_the_last_words_are_the_former_launchs_until_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat during the import of torch still says why the launch before crashed."""
    monkeypatch.setattr(restarts, "RESTART_PAUSE_S", 0.0)
    second = Simulated()
    runner, signals, did = runner_of(Play(max_restarts=2), Simulated(("out of memory",), ends=1), second)
    running = asyncio.create_task(runner.run(["train"], {}))
    while not [mark for mark in did if mark[0] == "trainer_start"][1:]:
        await asyncio.sleep(0)
    assert runner.last_lines() == ("out of memory",)
    second.lines = ("step 1",)
    assert runner.last_lines() == ("step 1",)
    signals.terminated.set()
    assert await running == 143 and second.told == ["end within 60 s", "kill leftovers"]


async def test_who_is_told_to_stop_may_end_by_itself_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core stopped it: rank 0 hears why and raises. SIGTERM to the agent leaves no such time, and no task."""
    monkeypatch.setattr(agent, "FAILURE_GRACE_S", 60.0)
    raises, hangs, ended = Simulated(), Simulated(), Simulated()
    runner, signals, _ = runner_of(Play())
    signals.stopped.set()
    waiting = asyncio.create_task(runner._wait_or_end(raises, 60.0))
    await asyncio.sleep(0.01)
    raises.code.set_result(75)
    assert await waiting == 75 and not raises.told
    monkeypatch.setattr(agent, "FAILURE_GRACE_S", 0.0)
    assert await runner._wait_or_end(hangs, 60.0) == 143 and hangs.told == ["end within 60 s"]
    monkeypatch.setattr(agent, "FAILURE_GRACE_S", 60.0)
    signals.stopped.clear()
    signals.terminated.set()
    async with asyncio.timeout(20):
        assert await runner._wait_or_end(ended, 60.0) == 143
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_pause_between_two_launches_ends_with_sigterm() -> None:
    """A command that crashes at once is not started a thousand times a second; who ends the agent does not wait."""
    signals, began = AgentSignals(), asyncio.get_running_loop().time()
    assert not await signals.wait_terminated(0.05)
    assert asyncio.get_running_loop().time() - began >= 0.05
    first = Simulated(ends=1)
    runner, signals, did = runner_of(Play(max_restarts=2), first)
    running = asyncio.create_task(runner.run(["train"], {}))
    while not [mark for mark in did if mark[0] == "trainer_end"]:
        await asyncio.sleep(0)
    signals.terminated.set()
    async with asyncio.timeout(20):
        assert await running == 1


# ---- before_start ----------------------------------------------------------------------------------------------------


def planned(*launches: Simulated, **settings: Any) -> tuple[CommandRunner, AgentSignals, list[Any]]:
    """A runner with a `before_start`; the launches are those of both commands."""
    return runner_of(Play(max_restarts=2, before_start=("plan",), **settings), *launches)


async def test_a_command_runs_before_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first and before each after a crash, with the same variables; what it leaves is killed first."""
    monkeypatch.setattr(restarts, "RESTART_PAUSE_S", 0.0)
    plans = [Simulated(("planned",), ends=0), Simulated(("planned anew",), ends=0)]
    runner, _, did = planned(plans[0], Simulated(ends=1), plans[1], Simulated(ends=0))
    assert await runner.run(["train"], {"A": "b"}) == 0
    kinds = [kind for kind, _ in did if kind != "remark"]
    launch = ["start", "before_start", "before_start_end", "start", "trainer_start", "trainer_end"]
    assert [kind for kind in kinds if kind in launch] == 2 * launch
    given = [fields for kind, fields in did if kind == "start"]
    assert given == [{"A": "b", "DIPS_ATTEMPT": number} for number in ("1", "1", "2", "2")]
    assert all(plan.told == ["kill leftovers"] for plan in plans)
    assert runner.last_lines() == ("planned anew",), "until the training command prints"


async def test_one_that_fails_counts_as_a_crash_of_the_training_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training command is not started; the agent's remark has the exit code and the last line."""
    monkeypatch.setattr(restarts, "RESTART_PAUSE_S", 0.0)

    class Refused(Simulated):
        async def find_cause(self) -> str:
            return "error: c.0 is missing"

    runner, _, did = planned(*(Refused(ends=3) for _ in range(3)))
    assert await runner.run(["train"], {}) == 3
    assert not [kind for kind, _ in did if kind == "trainer_start"]
    first, _ = [fields["text"] for kind, fields in did if kind == "remark"]
    assert first == "crashing, 1 of 2, exit 3, last line: before_start: error: c.0 is missing"
    assert "3 times in the same way before its first step" in runner._core.state.leaves_for


async def test_one_that_hangs_is_ended_and_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """After `collective_s`, which all other ranks wait at most; and the next one is run."""
    monkeypatch.setattr(restarts, "RESTART_PAUSE_S", 0.0)
    hangs = Simulated()
    runner, _, did = planned(hangs, Simulated(ends=0), Simulated(ends=0), before_start_s=0.05)
    async with asyncio.timeout(20):
        assert await runner.run(["train"], {}) == 0
    assert hangs.told == ["end within 10 s", "kill leftovers"]
    (remark,) = [fields["text"] for kind, fields in did if kind == "remark" and "crashing" in fields["text"]]
    assert remark == "crashing, 1 of 2, exit 124, last line: before_start: not done after 0.05 s (collective_s)"


@pytest.mark.parametrize("which", ["terminated", "stopped"])
async def test_who_ends_the_agent_ends_it(which: str) -> None:
    """SIGTERM, or an order of the core, while it runs: no launch follows, even if it then says that all is well."""
    plan = Simulated()
    runner, signals, did = planned(plan)
    running = asyncio.create_task(runner.run(["train"], {}))
    while not [kind for kind, _ in did if kind == "before_start"]:
        await asyncio.sleep(0)
    getattr(signals, which).set()
    plan.code.set_result(0)
    async with asyncio.timeout(20):
        await running
    assert [kind for kind, _ in did if kind == "start"] == ["start"]
