"""The training command's end when its agent is told to end: it has `end_grace_s` to save what it has."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from dips.client.agent import restarts, trainer
from dips.client.agent.agent import END_GRACE_S, AgentSignals, CommandRunner, mark_level
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
        return await CommandRunner(unused, unused, signals, unused, grace_s)._wait_or_end(process)

    assert asyncio.run(end()) == code
    assert saved.exists() == (code == 0)


def test_the_default_grace_is_that_of_a_large_checkpoint() -> None:
    """Minutes: who ends the agent sooner says so itself."""
    assert END_GRACE_S >= 120


def test_a_crash_is_told_once_and_as_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch that crashes is one remark. What a process that SIGKILL ended wrote before is not its cause."""
    monkeypatch.setattr(trainer, "kill_leftovers", list)  # it would end the other children of pytest
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
