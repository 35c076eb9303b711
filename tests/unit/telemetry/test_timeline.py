"""The timeline: bounded, read in order, and no reason to die."""

from __future__ import annotations

from pathlib import Path

from dips.telemetry.timeline import Timeline, older_path, read_marks


def test_two_files_are_kept(tmp_path: Path) -> None:
    """A full file becomes the older one, whose own content is forgotten; readers get both, oldest first."""
    path = tmp_path / "t" / "timeline.jsonl"
    timeline = Timeline(path, "me", most_bytes=2000)
    for n in range(200):
        timeline.record_mark("x", n=n)
    timeline.close()
    assert path.stat().st_size + older_path(path).stat().st_size < 4400
    numbers = [line["n"] for line in read_marks(path)]
    assert numbers == list(range(numbers[0], 200))
    assert len(numbers) > 20


def test_a_restarted_process_goes_on(tmp_path: Path) -> None:
    """The bound counts what lies there already; a torn last line is passed over."""
    path = tmp_path / "timeline.jsonl"
    for n in range(3):
        timeline = Timeline(path, "me", most_bytes=1000)
        timeline.record_mark("x", n=n, pad="." * 400)
        timeline.close()
    with path.open("a") as file:
        file.write('{"at": 1')
    assert [line["n"] for line in read_marks(path)] == [0, 1, 2]
