"""What a trainer said last, of what it and torchrun printed."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from dips.client.agent.trainer import CAUSE_CHARS, LINE_CHARS, TAIL_BYTES, ErrorTail, _pass_on, find_cause
from tests.open_files import nothing_left_open

TORCHRUN = """Traceback (most recent call last):
  File "train.py", line 3, in <module>
[rank0]: Traceback (most recent call last):
[rank0]: ValueError: no such file: corpus/
E1122 11:42:02.988000 27656 api.py:753] failed (exitcode: 1) local_rank: 0 (pid: 27693) of binary: /usr/bin/python
Traceback (most recent call last):
  File "torchrun", line 8, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("hello\n\n  bye  \n-----\n", "bye"),
        ("Traceback:\nValueError: x\nsome warning after it\n", "ValueError: x"),
        (TORCHRUN, "ValueError: no such file: corpus/"),
        ("x" * CAUSE_CHARS, "x" * CAUSE_CHARS),
        ("x" * 1000, "x" * (CAUSE_CHARS - 1) + "…"),
    ],
)
def test_the_last_line_is_the_error_itself(text: str, line: str) -> None:
    assert find_cause(text) == line


VICTIM = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50048. GLHF!\n"
LATER = "[rank1]: RuntimeError: Connection reset by peer\n"
BUG = "[rank1]: ValueError: user's bug\n"
WRONG = "[rank1]: dips.errors.ConfigError: c.yaml: pace: unknown key\n"


def page(rank: int, exitcode: str = "1") -> str:
    """What torchrun prints last."""
    return f"""torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
bug.py FAILED
Failures:
[1]:
  rank      : {1 - rank} (local_rank: {1 - rank})
  exitcode  : -15 (pid: 2706)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-24_00:30:24
  host      : localhost
  rank      : {rank} (local_rank: {rank})
  exitcode  : {exitcode} (pid: 2707)
============================================================
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (BUG + VICTIM + page(1), "ValueError: user's bug"),
        (VICTIM + BUG + page(1), "ValueError: user's bug"),
        (BUG + VICTIM + page(0), "ValueError: user's bug"),  # it looked too late, and saw rank 0 first
        (BUG + VICTIM, "ValueError: user's bug"),  # torchrun itself was killed
        (BUG + "[rank0]: KeyError: 'x'\n" + page(1), "ValueError: user's bug"),
        (BUG + "[rank0]: KeyError: 'x'\n" + page(0), "KeyError: 'x'"),
        (WRONG + VICTIM + page(1), WRONG.removeprefix("[rank1]: ").strip()),
        (VICTIM + page(1, "-9"), "rank 1 was killed by SIGKILL (out of memory?)"),
        (VICTIM + page(1, "-64"), "rank 1 was killed by SIGRTMAX"),
        (VICTIM + page(0), VICTIM.removeprefix("[rank0]: ").strip()),
        (VICTIM + LATER + page(0), VICTIM.removeprefix("[rank0]: ").strip()),  # both lost another host
    ],
)
def test_the_cause_is_that_of_the_rank_that_failed_first(text: str, cause: str) -> None:
    """What others raised for it, a connection that was closed, is usually printed later."""
    assert find_cause(text) == cause


def test_the_source_line_below_a_warning_is_not_the_cause() -> None:
    text = "starting\ntrain.py:69: UserWarning: the checkpoint is overtaken\n  self._resume(self.outer, held)\n"
    assert find_cause(text).endswith("UserWarning: the checkpoint is overtaken")


def test_the_last_lines_are_few_short_and_printable() -> None:
    """Those with words in them, as an agent sends them to its master; also while the process lives."""
    tail = ErrorTail()
    said = "print('line', i, '\\x1b[2J', 'x' * 300, file=sys.stderr)"
    code = f"import sys\nfor i in range(20): {said}\nprint('===', file=sys.stderr)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=tail.writer)
    tail.close_writer()
    process.wait()
    tail.finish()
    lines = tail.last_lines(8)
    assert [line.split()[1] for line in lines] == [str(i) for i in range(12, 20)]
    assert all(len(line) == LINE_CHARS and line.isprintable() for line in lines)


def test_output_is_passed_on_and_its_end_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, however much there is; what is kept is bounded, and the pipe is closed."""
    code = f"import sys; sys.stderr.write('y' * {3 * TAIL_BYTES} + '\\nlast\\n')"
    with nothing_left_open():
        tail = ErrorTail()
        process = subprocess.Popen([sys.executable, "-c", code], stderr=tail.writer)
        tail.close_writer()
        process.wait()
        assert tail.finish() == "last"
        assert capfd.readouterr().err == "y" * 3 * TAIL_BYTES + "\nlast\n"
        tail._thread.join()


def test_the_cause_may_come_after_the_end_of_the_process() -> None:
    """Its last words are still in the pipe when it has ended."""
    tail = ErrorTail()
    late = os.dup(tail.writer)
    tail.close_writer()
    with ThreadPoolExecutor(1) as pool:
        cause = pool.submit(tail.finish)
        os.write(late, b"ValueError: x\n")
        os.close(late)
        assert cause.result() == "ValueError: x"


def test_a_terminal_that_is_full_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another program has made non-blocking: nothing is lost, and no processor is burned."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    stderr, tries, seen = os.dup(2), list[bytes](), bytearray()
    write_really = os.write

    def try_write(fd: int, piece: bytes) -> int:
        assert len(tries) < 9, "it waits for room"
        tries.append(piece)
        return write_really(fd, piece)

    def make_room(*lists: Any) -> Any:
        seen.extend(os.read(read, 1 << 20))
        return lists

    monkeypatch.setattr(os, "write", try_write)
    monkeypatch.setattr(select, "select", make_room)
    os.dup2(write, 2)
    try:
        _pass_on(b"last words")
    finally:
        os.dup2(stderr, 2)
        for fd in (write, stderr):
            os.close(fd)
    seen.extend(os.read(read, 1 << 20))
    os.close(read)
    assert seen.strip(b"x") == b"last words"
