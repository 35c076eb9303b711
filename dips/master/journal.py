"""The journal: every event that the Coordinator processed, and a digest of its effects; and its replay."""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NamedTuple

import dips.protocol
from dips.dataclass import dataclass
from dips.errors import ConfigError, Corrupt, DipsError
from dips.protocol import codec
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Effect
from dips.protocol.events import Event
from dips.protocol.view import JournalView
from dips.telemetry.logs import Log

# ---- journal --------------------------------------------------------------------------------------------------------
# The journal: every event that the Coordinator processed, and a digest of its effects; for diagnosis, not the run's
# state (docs/rationale.md#30).
#
#     journal-<term>-<n>.jsonl        one segment: a head, then one line for each event
#     {"journal": 3, "term": 3, …, "state": […]}     the head, with the Coordinator's whole state before the first event
#     [12.25, ["Ticked"], "0f3a…", ["Note", "2 Order"]]
#                 when (master's clock), the event, digest and kinds of the effects
#     [12.25, ["Ticked"], "raised", ["KeyError('x')"]] the event that ended the master, and its exception: the last line
#
# The event loop only queues steps: a thread encodes and writes them. A disk that is full, or slower than the events,
# stops the journal with an error in the log, but not the master; later the journal begins again with a new segment.
# Nothing is fsynced: after a crash of the machine the last lines may be missing. It has no heartbeats, but the Judge's
# events. `dips-master replay` reads it.


FORMAT = 1
SEGMENTS_KEPT = 8  # newest segments on the disk: half a GiB is weeks of such a run
SEGMENT_BYTES = 64 << 20  # 600,000 events: days of ten clusters and a round a minute
RAISED = "raised"
MOST_WAITING = (
    20_000  # steps not yet written; some 20 MB, and seconds of the busiest run: a slower disk is no journal's
)
AT_ONCE = 256  # steps encoded into one write
RETRY_S = 60.0  # after it stopped, until a new segment is tried
CLOSE_S = 2.0  # a graceful end waits this long for the disk
_OF_NOTHING = codec.value_digest(())  # digest of no effects, the most frequent case
_NAME = re.compile(r"journal-(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True, slots=True)
class _Head:
    """The first line of a segment."""

    state: Any  # encoded


class JournalStep(NamedTuple):
    """One event, with its effects or its exception."""

    now: float
    event: Event
    effects: Sequence[Effect] | Exception  # effects are frozen, so another thread may read them


class Journal:
    """The journal of one term. Only the event loop calls it; its thread owns the files."""

    def __init__(
        self, directory: Path, run: str, term: int, segments: int, log: Log, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self._queue: SimpleQueue[_Head | JournalStep | None] = SimpleQueue()
        self._log = log
        self._stopped_at: float | None = None
        self._writer = _JournalWriter(directory, run, term, segments, log, segment_bytes)
        self._begun = False
        # a daemon thread: a hung disk must not keep the process alive
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    def step_journaled(self, coordinator: Coordinator, event: Event, now: float) -> list[Effect]:
        """Let the Coordinator process an event; record the event with its effects, or with the exception."""
        if self.is_segment_due():
            self.begin_segment(coordinator.capture_state())
        try:
            effects = coordinator.step(event, now)
        except Exception as error:
            self.record_step(event, now, error)
            raise
        self.record_step(event, now, effects)
        return effects

    def is_segment_due(self) -> bool:
        """Whether to begin a segment: at the start, after a full segment, and after a stop."""
        if not self._begun:
            return True
        if self._writer.failed or self._stopped_at is not None:
            return self._may_try_again()
        return self._writer.full

    def begin_segment(self, state: object) -> None:
        """Begin a segment with the Coordinator's whole state, which is encoded before this returns."""
        self._begun = True
        try:
            spelled = codec.encode_value(state)
        except DipsError as error:  # our bug; it must not cost the run its master
            self._writer.why = str(error)
            self._stop_writer()
            return
        self._writer.failed = self._writer.full = False
        self._stopped_at = None
        self._queue.put(_Head(spelled))

    def record_step(self, event: Event, now: float, effects: Sequence[Effect] | Exception) -> None:
        """Queue an event with its effects, or with the exception that ended the master."""
        if self._stopped_at is not None:
            return
        if self._writer.failed or self._queue.qsize() >= MOST_WAITING:
            self._stop_writer()
            return
        self._queue.put(JournalStep(now, event, effects))

    def read_status(self) -> JournalView:
        """Return for the status whether it writes, or will with the first step, how much it wrote, and how many steps
        wait.
        """
        writing = self._stopped_at is None and not self._writer.failed
        return JournalView(writing, self._writer.bytes_written, self._queue.qsize())

    def close(self) -> None:
        """Write the waiting steps, for at most CLOSE_S."""
        self._queue.put(None)
        self._thread.join(CLOSE_S)

    def _stop_writer(self) -> None:
        self._stopped_at = time.monotonic()
        why = self._writer.why or f"{MOST_WAITING} events wait for a disk that does not keep up"
        self._log.error("journal stopped; the run goes on without it", why=why, again_in_s=RETRY_S)

    def _may_try_again(self) -> bool:
        if self._stopped_at is None:
            self._stop_writer()
        assert self._stopped_at is not None
        return time.monotonic() - self._stopped_at >= RETRY_S and self._queue.empty()

    def _write_loop(self) -> None:
        while True:
            batch = [self._queue.get()]
            while batch[-1] is not None and len(batch) < AT_ONCE:
                try:
                    batch.append(self._queue.get_nowait())
                except Empty:
                    break
            self._writer.write_batch([item for item in batch if item is not None])
            if batch[-1] is None:
                self._writer.close()
                return


class _JournalWriter:
    """Writes the files, on the journal's thread; two of its flags are read by the event loop."""

    def __init__(self, directory: Path, run: str, term: int, segments: int, log: Log, segment_bytes: int) -> None:
        self._directory, self._run, self._term, self._log = directory, run, term, log
        self._segments, self._segment_bytes = segments, segment_bytes
        self._file: IO[bytes] | None = None
        self._size = self._segment = 0
        self.bytes_written = 0
        self.full = self.failed = False
        self.why = ""

    def write_batch(self, batch: Sequence[_Head | JournalStep]) -> None:
        lines = bytearray()
        try:
            for item in batch:
                if isinstance(item, _Head):
                    self._append_lines(lines)
                    lines.clear()
                    self._open_segment(item)
                elif self._file is not None:
                    lines += spell_step(item)
            self._append_lines(lines)
        except (OSError, DipsError) as error:
            self._on_failure(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_segment(self, head: _Head) -> None:
        self.close()
        number = self._segment + 1
        path = self._directory / f"journal-{self._term}-{number}.jsonl"
        self._file = path.open("wb", buffering=0)
        self._size, self.why = 0, ""  # without the head: a state as large as a segment must not begin the next one
        about = {
            "journal": FORMAT,
            "run": self._run,
            "term": self._term,
            "segment": number,
            "code": code_digest(),
            "wall": time.time(),
            "shapes": codec.field_names(head.state),
            "state": head.state,
        }
        try:
            self._write_all(codec.spell_json(about).encode() + b"\n")
        except OSError:
            path.unlink()  # on a disk that stays full, tries without a head would take the places of whole segments
            raise
        self._segment = number
        ours = (path for path in list_segments(self._directory) if _term_of(path) <= self._term)
        for old in list(ours)[: -self._segments]:  # those of later terms are of a run that `dips init --force` deleted
            old.unlink(missing_ok=True)

    def _append_lines(self, lines: bytes | bytearray) -> None:
        self._write_all(lines)
        before, self._size = self._size, self._size + len(lines)
        if before < self._segment_bytes <= self._size:  # once: what still waits for a full one begins no other
            self.full = True

    def _write_all(self, lines: bytes | bytearray) -> None:
        rest = memoryview(lines)
        while self._file is not None and len(rest):
            rest = rest[self._file.write(rest) :]
        self.bytes_written += len(lines)

    def _on_failure(self, error: Exception) -> None:
        self.why, self.failed = str(error), True
        try:
            self.close()
        except OSError:
            self._file = None  # it said what it had to say


def spell_step(step: JournalStep) -> bytes:
    """Return the line of one step."""
    event = codec.encode_value(step.event)
    if isinstance(step.effects, Exception):
        line = [step.now, event, RAISED, [repr(step.effects)]]
    else:
        digest = codec.value_digest(tuple(step.effects)) if step.effects else _OF_NOTHING
        line = [step.now, event, digest, count_kinds(step.effects)]
    return codec.spell_json(line).encode() + b"\n"


def count_kinds(effects: Sequence[Effect]) -> list[str]:
    """Return the kinds of effects in order, with counts of equal ones in a row, such as an order to every slave."""
    runs = [(kind, len(list(same))) for kind, same in groupby(type(effect).__name__ for effect in effects)]
    return [kind if count == 1 else f"{count} {kind}" for kind, count in runs]


def list_segments(directory: Path) -> list[Path]:
    """Return the segments of a directory, oldest first."""
    found = {path: m for path in directory.glob("journal-*.jsonl") if (m := _NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][1]), int(found[path][2])))


def newest_term(directory: Path) -> int:
    """Return the highest term with a journal here; 0 for none."""
    return max(map(_term_of, list_segments(directory)), default=0)


def _term_of(segment: Path) -> int:
    return int(segment.name.split("-")[1])


def code_digest() -> str:
    """Return a digest of the deciding code's sources: other code may decide differently, which a replay reports."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(dips.protocol.__path__[0])
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


# ---- replay ---------------------------------------------------------------------------------------------------------
# Each segment can be replayed alone, since it begins with the whole state; where one follows another, it must begin
# with the state in which the replay of the other ended.


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
    """Replay a segment, or all of a directory that have their first line, until one differs; raise ConfigError or
    Corrupt if none can be read.
    """
    paths = list(filter(_is_begun, list_segments(path))) if path.is_dir() else [path]
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


def _is_begun(segment: Path) -> bool:
    """Whether the first line is whole: it is not after a crash of the machine that came just behind it."""
    _, torn = next(_read_lines(segment), (None, True))
    return not torn


def _replay_one(path: Path, watch: Watch) -> Replayed:
    lines = _read_lines(path)
    head, torn = next(lines, (None, False))
    if not isinstance(head, dict) or head.get("journal") != FORMAT:
        written_by = head.get("journal") if isinstance(head, dict) else None
        raise Corrupt(
            f"{path}: expected the head of a journal of format {FORMAT} in the first line, got {written_by!r}; "
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
        if digest == RAISED:
            raised, differs = _raise_again(machine, event, now, kinds[0])
            break
        ordered = machine.step(event, now)
        watch(number, now, event, ordered)
        events, effects = events + 1, effects + len(ordered)
        if codec.value_digest(tuple(ordered)) != digest:
            differs = _describe_difference(path, number, now, event, kinds, ordered)
            break
    end = codec.encode_text(machine.capture_state())
    other = head["code"] != code_digest()
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
    now_kinds = count_kinds(ordered)
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
