"""The timeline: bounded, read in order, no reason to die, and nothing that anybody waits for."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from dips.telemetry import timeline as module
from dips.telemetry.timeline import FILE, Timeline, older_path, read_marks
from tests.waiting import until


def test_two_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file becomes the older one, whose own content is forgotten; readers get both, oldest first."""
    monkeypatch.setattr(module, "CLOSE_S", 60.0)  # whatever else the disk has to do
    path = tmp_path / "t" / FILE
    timeline = Timeline(path.parent, "r", "cluster", "me", most_bytes=2000)
    for n in range(200):
        timeline.record_mark("x", n=n)
    timeline.close()
    assert path.stat().st_size + older_path(path).stat().st_size < 4400
    numbers = [line["n"] for line in read_marks(path)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


def test_it_is_read_in_the_middle_of_a_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line once: it is renamed between two looks; the next one is not there yet."""
    path, opened = tmp_path / FILE, list[Path]()
    path.write_text('{"n": 1}\n')
    open_file = Path.open

    def rotate_behind(self: Path, *args: Any, **words: Any) -> Any:
        file = open_file(self, *args, **words)
        if not opened:
            path.replace(older_path(path))
        opened.append(self)
        return file

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", rotate_behind)
        assert [line["n"] for line in read_marks(path)] == [1]
    assert opened == [path, older_path(path)] and not path.exists()
    assert [line["n"] for line in read_marks(path)] == [1]
    path.write_text('{"n": 2}\n')
    assert [line["n"] for line in read_marks(path)] == [1, 2]
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        list(read_marks(tmp_path / "no.jsonl"))


def test_what_is_no_line_is_skipped(tmp_path: Path) -> None:
    """Bytes that are no text, as of a wrong file, or JSON of another kind, were a traceback of `dips trace`."""
    path = tmp_path / FILE
    path.write_bytes(b'{"n": 1}\n\xf6\x00\n[1]\n7\n' + 5_000 * b"7" + b'\n{"n": 2}\n{"n":')
    assert [line["n"] for line in read_marks(path)] == [1, 2]


def test_a_restarted_process_goes_on(tmp_path: Path) -> None:
    """The bound counts what lies there already; a torn last line is passed over, and takes no other with it."""
    path = tmp_path / FILE
    for n in range(3):
        timeline = Timeline(tmp_path, "r", "cluster", "me", most_bytes=1000)
        timeline.record_mark("x", n=n, pad="." * 400)
        timeline.close()
    with path.open("a") as file:
        file.write('{"at": 1')
    assert [line["n"] for line in read_marks(path)] == [0, 1, 2]
    again = Timeline(tmp_path, "r", "cluster", "me")
    for n in (3, 4):
        again.record_mark("x", n=n)
    again.close()
    assert [line["n"] for line in read_marks(path)] == [0, 1, 2, 3, 4]


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """NaN and Infinity are no JSON: whoever reads the lines with another program ended where a trainer had diverged."""
    timeline = Timeline(tmp_path, "r", "cluster", "me")
    timeline.record_mark("inner", loss=nan, norm=inf, tokens=7)
    timeline.close()
    line = json.loads((tmp_path / FILE).read_text(), parse_constant=pytest.fail)
    assert (line["loss"], line["norm"], line["tokens"]) == (None, None, 7)


def test_a_torn_line_on_a_full_disk_ends_no_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is written, and lost, before the process goes on: the writer's thread ended with that two times in five,
    and no line came any more.
    """
    (tmp_path / FILE).write_text('{"at": 1')
    lost, begin = list[int](), threading.Thread.start

    def wait_for_the_thread(thread: threading.Thread) -> None:
        begin(thread)
        thread.join()

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", wait_for_the_thread)
        patched.setattr(Timeline, "_write_lines", lambda timeline: lost.append(timeline.lines_lost))
        Timeline(tmp_path, "r", "cluster", "me")._file.close()
    assert lost == [0]


def test_a_file_is_full_at_its_bound(tmp_path: Path) -> None:
    """The line that reaches it is the last of its file; what comes after the end is counted as lost."""
    first = Timeline(tmp_path, "r", "cluster", "me")
    first.record_mark("x", n=0)
    first.close()
    first.record_mark("x", n=1)
    assert first.lines_lost == 1
    again = Timeline(tmp_path, "r", "cluster", "me", most_bytes=(tmp_path / FILE).stat().st_size)
    again.record_mark("x", n=2)
    again.close()
    assert [[line["n"] for line in read_marks(tmp_path / name)] for name in (FILE, FILE + ".1")] == [[0, 2], [0]]
    assert not again.lines_lost


def test_a_full_file_whose_place_was_taken_away_ends_nothing(tmp_path: Path) -> None:
    """Without its directory no file can be begun, and lines are lost; when it is back, the timeline goes on."""
    away = tmp_path.with_name(f"{tmp_path.name}-away")
    timeline = Timeline(tmp_path, "r", "slave", "me", most_bytes=100)
    timeline.record_mark("x", n=0, pad="." * 100)
    until(lambda: not timeline._waiting and (tmp_path / FILE).stat().st_size > 100)
    tmp_path.rename(away)
    timeline.record_mark("x", n=1)
    until(lambda: timeline.lines_lost == 1)
    tmp_path.mkdir()
    timeline.record_mark("x", n=2)
    timeline.close()
    assert [line["n"] for line in read_marks(tmp_path / FILE)] == [2]
    assert timeline.lines_lost == 1


def test_a_directory_that_is_made_anew_gets_the_next_lines(tmp_path: Path) -> None:
    """A slave makes its directory again when somebody has removed it; until then each line is counted as lost."""
    path = tmp_path / "d" / FILE
    timeline = Timeline(path.parent, "r", "slave", "me")
    for n in range(3):
        if n == 1:
            shutil.rmtree(path.parent)
        timeline.record_mark("x", n=n)
        if n == 1:
            until(lambda: timeline.lines_lost == 1)
            path.parent.mkdir()
        else:
            until(lambda: path.exists() and path.read_text())
    timeline.close()
    assert [line["n"] for line in read_marks(path)] == [2] and timeline.lines_lost == 1


def test_each_line_names_its_writer(tmp_path: Path) -> None:
    """`dips trace` tells a slave from a cluster of the same name by its lines."""
    timeline = Timeline(tmp_path, "r", "slave", "east")
    timeline.record_mark("x")
    until(lambda: bool((tmp_path / FILE).read_text()))  # without waiting for the end of the process
    timeline.close()
    assert not timeline._thread.is_alive()
    (line,) = read_marks(tmp_path / FILE)
    assert (line["run"], line["role"], line["who"], line["kind"]) == ("r", "slave", "east", "x")


def test_a_silent_disk_stops_nobody(tmp_path: Path) -> None:
    """A disk that takes no more bytes (here a pipe that nobody reads) costs lines beyond a bound, and no time."""
    os.mkfifo(tmp_path / FILE)
    reader = os.open(tmp_path / FILE, os.O_RDONLY | os.O_NONBLOCK)
    timeline = Timeline(tmp_path, "r", "slave", "me")
    marking = threading.Thread(
        target=lambda: [timeline.record_mark("x", pad="." * 100) for _ in range(module.MOST_WAITING + 2000)],
        daemon=True,
    )
    marking.start()
    marking.join(30)
    assert not marking.is_alive()
    assert timeline.lines_lost > 0
    began = time.monotonic()
    timeline.close()
    assert time.monotonic() - began < 3 * module.CLOSE_S
    os.close(reader)
