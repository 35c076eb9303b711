"""What a trainer said last, of what it and torchrun printed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dips.client.agent.error_tail import LINE_CHARS, TAIL_BYTES, ErrorTail, last_line

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
        ("x" * 1000, "x" * LINE_CHARS),
    ],
)
def test_the_last_line_is_the_error_itself(text: str, line: str) -> None:
    assert last_line(text) == line


def test_output_is_passed_on_and_its_end_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """Byte for byte, however much there is; what is kept is bounded."""
    tail = ErrorTail()
    code = f"import sys; sys.stderr.write('y' * {3 * TAIL_BYTES} + '\\nlast\\n')"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=tail.writer)
    tail.close_writer()
    process.wait()
    assert tail.finish() == "last"
    assert capfd.readouterr().err == "y" * 3 * TAIL_BYTES + "\nlast\n"
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(tail.writer)
