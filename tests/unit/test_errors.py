"""What an error advises, by its class; a message is read by nobody but people."""

from __future__ import annotations

import errno
import signal
from pathlib import Path

import pytest

from dips.errors import ConfigError, DifferentModel, UnavailableMaster, treatment_of
from dips.telemetry.exits import run_command


def test_errors_advise_by_their_class() -> None:
    """A model that differs is no key of a file, and exits like one: 78; a wrong key says what to do in its message."""
    assert treatment_of(DifferentModel()).exit_code == treatment_of(ConfigError()).exit_code == 78
    assert treatment_of(DifferentModel()).advice and treatment_of(UnavailableMaster("x: y")).advice
    assert treatment_of(ConfigError("shared.outer.lr: expected a number, got 'x'")).advice == ""


def test_a_command_ends_at_once_as_the_first_process_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel dropped SIGTERM: a slave's pod was Terminating for eleven minutes, a Job of `dips seed` for 30 s."""
    ended, former = list[int](), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("os.getpid", lambda: 1)
    monkeypatch.setattr("os._exit", ended.append)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        run_command(lambda: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, former)
    assert ended == [128 + signal.SIGTERM]


def test_a_command_that_fails_says_why_and_exits_by_its_class(capsys: pytest.CaptureFixture[str]) -> None:
    """One that does not is over when it returns."""
    called = list[str]()
    run_command(lambda: called.append("command"))
    assert called == ["command"]

    def fail() -> None:
        raise DifferentModel("a.w: expected shape (4,), got (5,)\x1b[2J")

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == 78
    assert capsys.readouterr().err.startswith("error: a.w: expected shape (4,), got (5,)\\x1b[2J\n")


def test_a_command_whom_nobody_answers_advises_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Not that it tries again by itself: it has ended."""

    def fail() -> None:
        raise UnavailableMaster("the master at 127.0.0.1:9 cannot be reached")

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == 69
    assert capsys.readouterr().err.splitlines()[1] == "start who is missing, or wait for it; then try again"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_fails_anywhere_is_a_sentence(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """A master whose directory cannot be written must not end as if that were our bug: 74, and it is started again."""

    def fail() -> None:
        raise OSError(number, "what the system says", "/var/lib/dips")

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == 74
    said, advised = capsys.readouterr().err.splitlines()
    assert said == f"error: [Errno {number}] what the system says: '/var/lib/dips'"
    assert advised == "make room on that disk, or repair it"


def test_a_file_of_another_user_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Daemons' directories are their user's alone: whoever typed `dips history` as another one got a traceback. An
    error without a file, as of a port, stays as it is.
    """

    def fail() -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/var/lib/dips/master/ledger.sqlite")

    with pytest.raises(SystemExit) as ended:
        run_command(fail)
    assert ended.value.code == 1
    told = "error: /var/lib/dips/master/ledger.sqlite: Permission denied: become the user whose it is, or let this one "
    assert capsys.readouterr().err == told + "use it\n"

    def listen() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        run_command(listen)


def test_another_error_of_the_system_is_shown_with_where_it_was_met() -> None:
    with pytest.raises(FileNotFoundError):
        run_command(Path("/nowhere/at/all").read_text)
