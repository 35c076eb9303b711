"""The journal: what the Coordinator decided is decided again from it, in any process; and it never stops the master."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
import structlog
from structlog.testing import capture_logs
from typer.testing import CliRunner

import dips.protocol
from dips.errors import ConfigError, Corrupt
from dips.master import journal as journal_module
from dips.master.app import cli
from dips.master.journal import (
    Journal,
    JournalStep,
    _Head,
    _JournalWriter,
    find_gaps,
    list_segments,
    newest_term,
    replay_journal,
)
from dips.protocol import codec, events, push_pull
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Effect
from dips.protocol.events import Event, OrderAnswered, Ticked
from dips.sim import master as sim_master
from tests.simulation.trial import play as play_seed
from tests.waiting import until

ROOT = Path(__file__).parents[3]
SEGMENTS = 8  # more than any of these writes


class Journalled(Coordinator):
    """Journals its own steps, as the runtime does; each incarnation of the master writes a term of its own."""

    directory: Path
    made: list[Journal]

    def step(self, event: Event, now: float) -> list[Effect]:
        journal = self._journal()
        if journal.is_segment_due():
            journal.begin_segment(self.capture_state())
        effects = super().step(event, now)
        journal.record_step(event, now, effects)
        return effects

    def _journal(self) -> Journal:
        while len(self.made) < self.term:
            term = len(self.made) + 1
            self.made.append(Journal(self.directory, "simulated", term, SEGMENTS, structlog.get_logger()))
        return self.made[self.term - 1]


def journal_into(directory: Path) -> Path:
    """Play a seed of the simulated world with its master's journal in a directory."""
    Journalled.directory, Journalled.made = directory, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim_master, "Coordinator", Journalled)
        patch.setattr(journal_module, "CLOSE_S", 60.0)  # a busy machine is no slow disk
        assert play_seed((0, None)).failure is None
        for journal in Journalled.made:
            journal.close()
    return directory


@pytest.fixture(name="played", scope="module")
def played_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a whole run; whoever changes it takes a copy."""
    return journal_into(tmp_path_factory.mktemp("played"))


@pytest.fixture(name="copy")
def copied(played: Path, tmp_path: Path) -> Path:
    """A journal of its own for a test that changes it."""
    return shutil.copytree(played, tmp_path / "copy")


def test_the_same_effects_again(played: Path) -> None:
    """A run full of faults, with restarts of its master, is decided again from its journals, event for event."""
    done = replay_journal(played)
    assert [one.differs for one in done] == [""] * len(done)
    assert len({one.term for one in done}) > 1
    assert sum(one.events for one in done) > 400
    assert not any(one.torn or one.other_code for one in done)


def journal_again(played: Path, directory: Path, **options: Any) -> Path:
    """Write the run of another journal once more, in segments of another size; nothing is decided by a simulation."""
    for segment in list_segments(played):
        head, *lines = map(json.loads, segment.read_text().splitlines())
        machine = Coordinator.from_state(codec.decode_value(head["state"]))
        journal = Journal(directory, "simulated", machine.term, log=structlog.get_logger(), **options)
        for now, spelled, *_ in lines:
            event = codec.decode_value(spelled)
            if journal.is_segment_due():
                journal.begin_segment(machine.capture_state())
            journal.record_step(event, now, machine.step(event, now))
            wait_for_writer(journal)
        journal.close()
    return directory


def wait_for_writer(journal: Journal) -> None:
    """Steps are faster than the thread that writes them."""
    until(lambda: journal.read_status().waiting == 0)


def test_segments_rotate_and_each_begins_with_the_whole_state(played: Path, tmp_path: Path) -> None:
    """A full segment is followed by another that can be replayed alone, and that begins where the first ended."""
    directory = journal_again(played, tmp_path, segment_bytes=65536, segments=1000)
    done = replay_journal(directory)
    assert len(done) > 3
    assert not any(one.differs for one in done)
    assert list(find_gaps(done)) == []
    middle = list_segments(directory)[len(done) // 2]
    (alone,) = replay_journal(middle)
    assert alone.events > 0 and not alone.differs


def test_old_segments_go(played: Path, tmp_path: Path) -> None:
    """Only the newest are kept, whatever the term, and they are whole."""
    directory = journal_again(played, tmp_path, segment_bytes=65536, segments=3)
    assert len(list_segments(directory)) == 3
    assert newest_term(directory) == newest_term(played) > 1
    assert not any(one.differs for one in replay_journal(directory))


@pytest.mark.parametrize("state", [[], ["x" * 4096]])
def test_what_waits_for_a_full_segment_begins_no_other(tmp_path: Path, state: list[str]) -> None:
    """Nor does a state that is as large as one: a busy master began several with nothing in them, and each took the
    place of a whole one."""
    writer = _JournalWriter(tmp_path, "r", 1, SEGMENTS, structlog.get_logger(), 4096)
    steps = [JournalStep(1.0, Ticked(), [])] * 200
    for _ in range(2):
        writer.write_batch([_Head(state)])
        assert not writer.full
        writer.write_batch(steps)
        assert writer.full
        writer.full = False  # the next one is on its way
        writer.write_batch(steps)
        assert not writer.full
    writer.close()


def test_a_step_is_in_one_segment(tmp_path: Path) -> None:
    """A batch has the end of one and the next one's begin: repeated there, steps would be replayed upon a state that
    has them, and the replay differ."""
    writer = _JournalWriter(tmp_path, "r", 1, SEGMENTS, structlog.get_logger(), 4096)
    first, second = (JournalStep(at, Ticked(), []) for at in (1.0, 2.0))
    writer.write_batch([_Head([]), first, _Head([]), second])
    writer.close()
    steps = [[json.loads(line)[0] for line in path.read_text().splitlines()[1:]] for path in list_segments(tmp_path)]
    assert steps == [[1.0], [2.0]]


def test_a_run_that_begins_anew_keeps_its_own_segments(tmp_path: Path) -> None:
    """`dips init --force` leaves those of the run before, whose terms are later than the first of the new one."""
    for term in range(5, 8):
        (tmp_path / f"journal-{term}-1.jsonl").write_text("{}\n")
    journal = Journal(tmp_path, "r", 1, 3, structlog.get_logger())
    for _ in range(4):
        journal.begin_segment(())
    wait_for_writer(journal)
    journal.close()
    kept = [path.name.removeprefix("journal-").removesuffix(".jsonl") for path in list_segments(tmp_path)]
    assert kept == ["1-2", "1-3", "1-4", "5-1", "6-1", "7-1"]


def test_a_journal_that_has_nothing_to_write_yet_does_not_fail(tmp_path: Path) -> None:
    """A master to which nobody has spoken has no disk that fails it."""
    journal = Journal(tmp_path, "r", 1, 3, structlog.get_logger())
    assert journal.read_status().writing
    journal.close()


def in_another_process(directory: Path, seed: str) -> subprocess.CompletedProcess[str]:
    code = "from dips.master.app import main; main()"
    words = [sys.executable, "-c", code, "replay", str(directory)]
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_the_same_under_another_hash_seed(played: Path, hash_seed: str) -> None:
    """`dips-master replay` in processes whose hashes differ from ours gives the same effects."""
    done = in_another_process(played, hash_seed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same effects" in done.stdout


def test_a_walk_over_a_set_is_found(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check bites: code that tells a set in its own order is found by another process, where it did."""

    def note_set(run: Any, event: Any) -> None:
        staged(run, event)
        run.emit_note("staged", on=",".join({f"{event.slave}-{i}" for i in range(30)}))

    staged = push_pull.on_push_staged
    monkeypatch.setitem(sys.modules["dips.protocol.coordinator"].HANDLERS, events.PushStaged, note_set)
    directory = journal_again(played, tmp_path, segments=SEGMENTS)
    assert not any(one.differs for one in replay_journal(directory))
    script = "import sys; from dips.protocol import coordinator, events, push_pull\nstaged = push_pull.on_push_staged\n"
    script += "def note_set(w, event):\n    staged(w, event)\n"
    script += "    w.emit_note('staged', on=','.join({f'{event.slave}-{i}' for i in range(30)}))\n"
    script += "coordinator.HANDLERS[events.PushStaged] = note_set\n"
    script += "from dips.master.journal import replay_journal; from pathlib import Path\n"
    script += "print(replay_journal(Path(sys.argv[1]))[-1].differs)"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not ours
    said = subprocess.run(
        [sys.executable, "-c", script, str(directory)], cwd=ROOT, check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
    ).stdout  # fmt: skip
    assert "PushStaged" in said and "of the same kinds, with other contents" in said


def test_where_it_differs_is_said(played: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that has changed since is shown at its first event, with what was ordered then and now; exit code 1."""
    monkeypatch.setitem(sys.modules["dips.protocol.coordinator"].HANDLERS, OrderAnswered, lambda w, event: None)
    result = CliRunner().invoke(cli, ["replay", str(played)])
    assert result.exit_code == 1
    assert re.search(r"line \d+: at [0-9.]+ s the effects of\n.*PullRequested", result.stdout)
    assert "  then: Reply\n  now:\n    Reply(" in result.stdout


def test_a_torn_end_is_no_difference(copy: Path) -> None:
    """A master that was killed in the middle of a line leaves a journal that is good up to there."""
    last = max(list_segments(copy), key=lambda segment: segment.stat().st_size)
    last.write_bytes(last.read_bytes()[:-7])
    (one,) = replay_journal(last)
    assert one.torn and not one.differs and one.events > 0


@pytest.mark.parametrize("torn", [False, True])
def test_behind_a_segment_whose_end_is_torn_no_gap_is_told(copy: Path, torn: bool) -> None:
    """What the last line had changed is not known, so the next one may begin in another state."""
    one = replay_journal(copy)[0]
    before, after = replace(one, segment=1, end="then", torn=torn), replace(one, segment=2, begin="now")
    assert len(list(find_gaps([before, after]))) == (not torn)


def test_a_segment_whose_first_line_is_lost_hides_no_other(copy: Path) -> None:
    """A machine that crashed just after a segment had begun left a file with nothing in it, or with a part of its
    first line: a replay of all passes over it.
    """
    segments = list_segments(copy)
    for rest, segment in ((0, segments[0]), (40, segments[1])):
        segment.write_bytes(segment.read_bytes()[:rest])
    assert [one.path for one in replay_journal(copy)] == segments[2:] != []


def test_what_ended_the_master_is_in_its_journal(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event at which the deciding code raised is the last line, and a replay raises the same."""
    path = list_segments(copy)[-1]
    line = [1e6, ["Ticked"], "raised", ["KeyError('x')"]]
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    (one,) = replay_journal(path)
    assert "raised KeyError('x'); now it raises nothing" in one.differs

    def broken(w: Any, event: Any) -> None:
        raise KeyError("x")

    monkeypatch.setitem(sys.modules["dips.protocol.coordinator"].HANDLERS, Ticked, broken)
    head = json.loads(path.read_text().splitlines()[0])
    journal = Journal(copy / "again", "simulated", 9, SEGMENTS, structlog.get_logger())
    (copy / "again").mkdir()
    with pytest.raises(KeyError):
        journal.step_journaled(Coordinator.from_state(codec.decode_value(head["state"])), Ticked(), 1e6)
    journal.close()
    (one,) = replay_journal(copy / "again")
    assert "raises KeyError('x')" in one.raised and not one.differs


@pytest.mark.parametrize(
    ("content", "error"),
    [(b"", Corrupt), (b"{}\n", Corrupt), (b"[]\n", Corrupt), (b"not json\n", Corrupt), (None, ConfigError)],
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes | None, error: type[Exception]) -> None:
    """An empty file, other JSON, no JSON, no file, an empty directory: each is named."""
    path = tmp_path / "journal-1-1.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match="journal"):
        replay_journal(path)


def test_a_journal_of_another_version_is_refused(copy: Path) -> None:
    """A state whose classes had other fields is not guessed at."""
    path = list_segments(copy)[0]
    head, _, rest = path.read_text().partition("\n")
    raw = json.loads(head)
    raw["shapes"]["Options"].append("colour")
    path.write_text(json.dumps(raw) + "\n" + rest)
    with pytest.raises(Corrupt, match=r"Options: has lost \['colour'\]"):
        replay_journal(path)


# ---- a disk that fails ----------------------------------------------------------------------------------------------


class Full:
    """A file on a disk that is full, or that hangs."""

    def __init__(self, file: IO[bytes], behave: Callable[[], None]) -> None:
        self._file, self._behave = file, behave

    def write(self, data: bytes) -> int:
        self._behave()
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()


def bare(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path, "r", 1, SEGMENTS, structlog.get_logger())
    assert journal.is_segment_due()
    journal.begin_segment((1, 2))
    return journal


def test_a_full_disk_stops_the_journal_and_not_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so once and takes no more; after a while it begins anew with a segment of its own."""
    monkeypatch.setattr(journal_module, "RETRY_S", 60.0)
    journal = bare(tmp_path)
    until(lambda: journal.read_status().bytes > 0)

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    journal._writer._file = Full(journal._writer._file, full)  # type: ignore[assignment, arg-type]
    with capture_logs() as logs:
        journal._log = structlog.get_logger()
        journal.record_step(Ticked(), 1.0, [])
        until(lambda: journal._writer.failed)
        for _ in range(5):
            journal.record_step(Ticked(), 2.0, [])
    assert [line["event"] for line in logs] == ["journal stopped; the run goes on without it"]
    assert "no space left" in logs[0]["why"]
    assert journal.read_status().writing is False and not journal.is_segment_due(), "not again at once"
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    until(journal.is_segment_due)
    journal.begin_segment((3,))
    journal.record_step(Ticked(), 3.0, [])
    journal.close()
    assert [path.name for path in list_segments(tmp_path)] == ["journal-1-1.jsonl", "journal-1-2.jsonl"]
    assert list_segments(tmp_path)[1].read_text().count("\n") == 2


def test_a_disk_that_stays_full_costs_no_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try to begin anew fails in its first line. Nothing is left of it, so what was written before is kept."""
    journal, is_full, open_file = Journal(tmp_path, "r", 1, 3, structlog.get_logger()), True, Path.open
    for begun in (1, 2, 3):
        journal.begin_segment(())
        until(lambda begun=begun: journal._writer._segment == begun)

    def full() -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "no space left on device")

    def open_on_it(path: Path, *how: Any, **more: Any) -> Any:
        file = open_file(path, *how, **more)
        return Full(file, full) if path.parent == tmp_path else file

    monkeypatch.setattr(Path, "open", open_on_it)
    for _ in range(5):
        journal.begin_segment(())
        until(lambda: journal._writer.failed)
    assert [path.name for path in list_segments(tmp_path)] == [f"journal-1-{n}.jsonl" for n in (1, 2, 3)]
    is_full = False
    journal.begin_segment(())
    journal.close()
    assert [path.name for path in list_segments(tmp_path)] == [f"journal-1-{n}.jsonl" for n in (2, 3, 4)]


def test_a_slow_disk_stops_the_journal_and_not_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a write hangs, taking steps costs nothing and what waits is bounded; what was written stays good."""
    monkeypatch.setattr(journal_module, "MOST_WAITING", 100)
    monkeypatch.setattr(journal_module, "RETRY_S", 0.0)
    journal = bare(tmp_path)
    until(lambda: journal.read_status().bytes > 0)
    hangs, reached = True, threading.Event()

    def hang() -> None:
        reached.set()
        until(lambda: not hangs)

    journal._writer._file = Full(journal._writer._file, hang)  # type: ignore[assignment, arg-type]
    with capture_logs() as logs:
        journal._log = structlog.get_logger()
        for at in range(1000):
            journal.record_step(Ticked(), float(at), [])
            assert reached.wait(20.0) and journal.read_status().waiting <= 100
    assert "a disk that does not keep up" in logs[0]["why"] and len(logs) == 1
    assert not journal.is_segment_due(), "before what waits is written, a new segment would wait, too"
    hangs = False
    journal.close()
    lines = list_segments(tmp_path)[0].read_text().splitlines()[1:]
    assert [json.loads(line)[0] for line in lines] == [float(at) for at in range(len(lines))]
    assert 90 <= len(lines) < 500


def test_a_state_that_cannot_be_spelled_stops_the_journal_and_not_the_master(tmp_path: Path) -> None:
    """That is a bug of ours, which is said; nothing is queued for a segment that never begins."""
    journal = bare(tmp_path)
    wait_for_writer(journal)
    with capture_logs() as logs:
        journal._log = structlog.get_logger()
        journal.begin_segment(object())
        journal.record_step(Ticked(), 1.0, [])
    assert [line["event"] for line in logs] == ["journal stopped; the run goes on without it"]
    assert not journal.read_status().writing and journal.read_status().waiting == 0
    journal.close()


@pytest.mark.parametrize("asked", [False, True])
def test_a_directory_that_cannot_be_written_is_said(tmp_path: Path, asked: bool) -> None:
    """Also the first segment may fail, before a step or before the question for the next segment: the master serves."""
    with capture_logs() as logs:
        journal = Journal(tmp_path / "missing", "r", 1, SEGMENTS, structlog.get_logger())
        journal.begin_segment((1,))
        until(lambda: journal._writer.failed)
        assert not asked or not journal.is_segment_due()
        journal.record_step(Ticked(), 1.0, [])
    assert journal.read_status().writing is False
    assert [line["event"] for line in logs] == ["journal stopped; the run goes on without it"]
    journal.close()


@pytest.mark.parametrize("file", ["gates/norms.py", "rules.py", "__init__.py"])
def test_a_gate_or_rule_that_changed_is_other_code(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deciding code lies in folders, too; a replay that differs says whether its code does."""
    shutil.copytree(Path(dips.protocol.__path__[0]), tmp_path / "p", ignore=shutil.ignore_patterns("__pycache__"))
    before = journal_module.code_digest()
    monkeypatch.setattr(dips.protocol, "__path__", [str(tmp_path / "p")])
    assert journal_module.code_digest() == before
    with (tmp_path / "p" / file).open("a") as changed:
        changed.write("# changed")
    assert journal_module.code_digest() != before
