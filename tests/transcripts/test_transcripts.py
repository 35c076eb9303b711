"""Stories of the Coordinator, readable by an operator; with DIPS_REWRITE=1 today's answers are written down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.replay import replay

STORIES = sorted(Path(__file__).parent.glob("*.txt"))
NAMED = 16  # stories that the project promised to tell


@pytest.mark.parametrize("path", STORIES, ids=lambda p: p.stem)
def test_a_story_is_told_as_written(path: Path) -> None:
    """The Coordinator answers every command of the story as the text says."""
    told, written = replay(path.read_text()), path.read_text()
    if os.environ.get("DIPS_REWRITE") == "1":
        path.write_text(told)
        return
    assert told == written, f"{path.name}: read the difference; if it is meant, DIPS_REWRITE=1 writes it"


def test_the_stories_are_there() -> None:
    """Every named story is told, each begins with what it is about, and none is empty."""
    assert len(STORIES) >= NAMED
    for path in STORIES:
        text = path.read_text()
        assert text.startswith("# "), f"{path.name} does not say what it is about"
        assert text.count("\n> ") >= 4, f"{path.name} tells nothing"


def test_a_story_is_not_its_own_witness() -> None:
    """A changed answer is noticed: the replay does not depend on what stands in the text."""
    text = "# x\n> run begins\nthis was never said\n\n> all ready\n> a joins\n"
    told = replay(text)
    assert "never said" not in told
    assert "a ← Joined as incarnation 1" in told


def test_an_unknown_command_is_refused() -> None:
    """A misspelt command is an error that lists those that exist."""
    with pytest.raises(ValueError, match="asks-push"):
        replay("> run begins\n> a asks-psuh push=a/1#1\n")
