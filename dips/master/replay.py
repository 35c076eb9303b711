"""Replays a journal: a fresh Coordinator processes the events of each segment, and must return the same effects again.

Each segment can be replayed alone, since it begins with the whole state; where one follows another, it must begin with
the state in which the replay of the other ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from dips.dataclass import dataclass
from dips.errors import ConfigError, Corrupt
from dips.master import journal
from dips.protocol import codec
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Effect
from dips.protocol.events import Event

Watch = Callable[[int, float, Event, list[Effect]], None]  # (line, time, event, effects)


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result for one segment; `differs` says where and how it was not the same, "" if it was."""

    path: Path
    term: int
    segment: int
    events: int
    effects: int
    torn: bool  # its last line is incomplete: its master was killed
    other_code: bool  # the deciding code differs from the one that wrote it
    differs: str
    raised: str  # the exception that ended the master at the last event, and was raised again; "" if none was
    end: str  # the state after the last event, as text
    begin: str


def replay_journal(path: Path, watch: Watch = lambda *_: None) -> list[Replayed]:
    """Replay a segment, or all of a directory, until one differs; raise ConfigError or Corrupt if none can be read."""
    paths = journal.list_segments(path) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path}: no journal is here (journal-<term>-<n>.jsonl in the master's directory)")
    done: list[Replayed] = []
    for each in paths:
        done.append(_replay_one(each, watch))
        if done[-1].differs:
            break
    return done


def find_gaps(done: list[Replayed]) -> Iterator[str]:
    """Describe where a segment does not begin in the state in which the one before it ended."""
    for before, after in pairwise(done):
        follows = (after.term, after.segment) == (before.term, before.segment + 1)
        if follows and not before.torn and after.begin != before.end:
            yield f"{after.path.name} does not begin where {before.path.name} ends: it had stopped between them"


def _replay_one(path: Path, watch: Watch) -> Replayed:
    lines = _read_lines(path)
    head, torn = next(lines, (None, False))
    if not isinstance(head, dict) or head.get("journal") != journal.FORMAT:
        written_by = head.get("journal") if isinstance(head, dict) else None
        raise Corrupt(
            f"{path}: expected the head of a journal of format {journal.FORMAT} in the first line, got {written_by!r}; "
            "replay it with the Di-PS that wrote it"
        )
    if changed := codec.class_differences(head["shapes"]):
        raise Corrupt(f"{path} was written by another Di-PS, whose state this one cannot read: {'; '.join(changed)}")
    machine = Coordinator.from_state(codec.decode_value(head["state"]))
    begin = codec.encode_text(machine.capture_state())
    events = effects = 0
    differs = raised = ""
    for number, (line, torn) in enumerate(lines, 2):
        if torn:
            break
        now, spelled, digest, kinds = line
        event = codec.decode_value(spelled)
        if digest == journal.RAISED:
            raised, differs = _raise_again(machine, event, now, kinds[0])
            break
        ordered = machine.step(event, now)
        watch(number, now, event, ordered)
        events, effects = events + 1, effects + len(ordered)
        if codec.value_digest(tuple(ordered)) != digest:
            differs = _describe_difference(path, number, now, event, kinds, ordered)
            break
    end = codec.encode_text(machine.capture_state())
    other = head["code"] != journal.code_digest()
    return Replayed(path, head["term"], head["segment"], events, effects, torn, other, differs, raised, end, begin)


def _raise_again(machine: Coordinator, event: Event, now: float, how: str) -> tuple[str, str]:
    """Process the event that ended the master; return (how it ends this one, the difference if it does not)."""
    try:
        machine.step(event, now)
    except Exception as error:  # noqa: BLE001 (whatever ended the master)
        return f"{event} at {now:.6f} s raises {error!r}", "" if repr(error) == how else f"then it raised {how}"
    return "", f"{event} at {now:.6f} s raised {how}; now it raises nothing"


def _describe_difference(
    path: Path, number: int, now: float, event: Event, kinds: list[str], ordered: list[Effect]
) -> str:
    now_kinds = journal.count_kinds(ordered)
    same = " (of the same kinds, with other contents)" if kinds == now_kinds else ""
    listed = "\n".join(f"    {effect}" for effect in ordered) or "    nothing"
    return (
        f"{path.name}, line {number}: at {now:.6f} s the effects of\n    {event}\nare not those of the journal{same}\n"
        f"  then: {', '.join(kinds) or 'nothing'}\n  now:\n{listed}"
    )


def _read_lines(path: Path) -> Iterator[tuple[Any, bool]]:
    """Iterate over the lines as data; (None, True) for an incomplete last one. Raise Corrupt on other invalid lines."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    yield None, True
                    return
                try:
                    yield json.loads(line), False
                except ValueError as error:
                    raise Corrupt(f"{path}, line {number}: is not JSON: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
