"""The harness of the benchmarks: what a row promises, what the exit code says, what is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from benchmarks import __main__ as every
from benchmarks import harness, kernels
from benchmarks.harness import Bench, Seconds
from benchmarks.record import ROOT, shown


@pytest.fixture(autouse=True)
def _sigterm() -> Iterator[None]:
    """`main` runs here in the process of the tests, whose own end it must not change."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _short_triad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once over 4 MB: whoever describes the machine measures it, for a second."""
    monkeypatch.setattr(kernels, "triad_rate", partial(kernels.triad_rate, 1 << 20, 1))


def run(measure: object, *words: str) -> int:
    with pytest.raises(SystemExit) as end:
        harness.main("toy", "A toy.", measure, argv=words)  # type: ignore[arg-type]
    return int(end.value.code or 0)


def rate(value: float) -> object:
    def measure(bench: Bench) -> None:
        bench.row("rate", value, "B/s", against="memcpy", of=10e9, least=0.8)

    return measure


@pytest.mark.parametrize(("value", "code"), [(8e9, 0), (7.9e9, 1)])
def test_the_exit_code_is_one_if_a_row_does_not_hold(value: float, code: int) -> None:
    """0.80 of what is promised holds, 0.79 does not."""
    assert run(rate(value), "--quick") == code


def test_the_file_has_machine_commit_and_rows(tmp_path: Path) -> None:
    """The interface that others read: every field of a row under its name."""
    run(rate(9e9), "--json", str(tmp_path / "toy.json"))
    made = json.loads((tmp_path / "toy.json").read_text())
    assert made["machine"]["cores"] >= 1 and made["commit"]
    assert made["rows"] == [
        {
            "name": "rate",
            "value": 9e9,
            "unit": "B/s",
            "against": "memcpy",
            "ratio": 0.9,
            "least": 0.8,
            "holds": True,
            "less": False,
            "bound": "",
            "of": 10e9,
        }
    ]


@pytest.mark.parametrize(("seconds", "holds"), [(1.9, True), (2.1, False)])
def test_a_bound_from_above_is_a_ratio_turned_over(seconds: float, holds: bool) -> None:
    """At most twice the time of 1 s: 1.9 s holds, 2.1 s does not."""

    def measure(bench: Bench) -> None:
        assert bench.row("round", seconds, "s", against="gloo", of=1.0, least=0.5, less=True).holds is holds

    run(measure)


def test_a_row_without_a_promise_holds(tmp_path: Path) -> None:
    """A number that only informs never fails a run."""
    assert run(lambda bench: bench.row("seen", 1.0, "s")) == 0


def test_works_are_measured_in_turn_and_warmed_up_once() -> None:
    """One warm-up each, then the runs, alternating; the result has every work's median."""
    order: list[str] = []

    def measure(bench: Bench) -> None:
        took = bench.together({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, runs=2)
        assert set(took) == {"a", "b"} and all(t >= 0 for t in took.values())

    run(measure)
    assert order == ["a", "b"] * 3


def test_only_seconds_count_as_what_a_work_says_it_took() -> None:
    """A kernel's float result is no time; Seconds are, whatever went on around them."""

    def measure(bench: Bench) -> None:
        took = bench.together({"kernel": lambda: 0.0, "transfer": lambda: Seconds(5.0)}, runs=1)
        assert 0 < took["kernel"] < 1 and took["transfer"] == 5.0

    run(measure)


def test_the_machine_is_described_without_its_name() -> None:
    """Cores, versions and the triad's rate say what figures can be compared with; no host is named, nor a path."""
    made = harness.machine()
    assert made["cores"] >= 1 and made["numpy"] and made["triad"].endswith("B/s")
    assert os.uname().nodename not in json.dumps(made) and "/" not in json.dumps({**made, "triad": "", "cpu": ""})


def test_only_changes_of_what_is_measured_are_changes(tmp_path: Path) -> None:
    """Each run but the first of a day would have been one of a changed tree, by the results of the one before."""

    def git(*words: str) -> None:
        own = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True)

    code, table, result = (
        tmp_path / "dips.py",
        tmp_path / "benchmarks/README.md",
        tmp_path / "benchmarks/results/a.json",
    )
    result.parent.mkdir(parents=True)
    for file in (code, table, result):
        file.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    clean = harness.commit(tmp_path)
    table.write_text("2")
    result.write_text("2")
    assert harness.commit(tmp_path) == clean and not clean.endswith("+")
    code.write_text("2")
    assert harness.commit(tmp_path) == f"{clean}+"


@pytest.mark.parametrize(("later", "told"), [("a1", "a1"), ("a1+", "a1+"), ("b2", "a1+")])
def test_a_run_is_of_the_commit_at_which_it_began(later: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours of a benchmark would have been recorded under a commit that was made while it ran."""
    commits = iter(("a1", later))
    monkeypatch.setattr(harness, "commit", lambda: next(commits))
    monkeypatch.setattr(harness, "machine", dict)
    monkeypatch.setattr(harness, "make_table", str)
    monkeypatch.setattr(harness, "TABLE", Path(os.devnull))
    logged = []
    monkeypatch.setattr(harness, "append_runs", logged.extend)
    assert run(lambda bench: bench.row("seen", 1.0, "s"), "--log") == 0
    assert [made["commit"] for _, made in logged] == [told]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(2.5e9, "B/s", "2.5 GB/s"), (0.012, "s", "12 ms"), (3.5, "s", "3.5 s"), (28.0, "B/parameter", "28 B/parameter")],
)
def test_numbers_are_shown_as_a_person_reads_them(value: float, unit: str, text: str) -> None:
    """Bytes and short times carry a prefix."""
    assert shown(value, unit) == text


def test_sigterm_unwinds_what_is_under_way() -> None:
    """A benchmark that gets SIGTERM, twice, takes down what it made, and says so by its exit code."""
    program = """
        import os, signal, time
        from contextlib import contextmanager
        from benchmarks.harness import end_in_order

        @contextmanager
        def made():
            try:
                yield
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                print("taken down", flush=True)

        end_in_order()
        with made():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "taken down\n"), done.stderr


def test_a_benchmark_ends_well_where_the_machine_lacks_something(tmp_path: Path) -> None:
    """Its note says what; nothing after that was measured."""

    def measure(bench: Bench) -> None:
        bench.skip_if(None)
        bench.skip_if("no such device")
        bench.row("rate", 1.0, "B/s")

    assert run(measure, "--json", str(tmp_path / "toy.json")) == 0
    made = json.loads((tmp_path / "toy.json").read_text())
    assert made["rows"] == [] and made["notes"] == ["nothing was measured: no such device"]


def test_a_benchmark_that_measured_nothing_is_no_run_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty run would have been appended, beside which no test of the record passes."""
    monkeypatch.setattr(harness, "append_runs", lambda _: pytest.fail("it was appended"))
    assert run(lambda bench: bench.skip_if("no such device"), "--log") == 0


def test_a_benchmark_that_cannot_run_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make bench` would have called its lanes and links measured where nobody may make namespaces."""

    class Skipped(subprocess.Popen[bytes]):
        def __init__(self, command: list[str], **_: object) -> None:
            made = {"rows": [], "notes": ["nothing was measured: no such device"]}
            Path(command[command.index("--json") + 1]).write_text(json.dumps(made))
            super().__init__(["true"])

    monkeypatch.setattr(every.subprocess, "Popen", Skipped)
    assert every.run("toy", quick=False) == (None, "nothing was measured: no such device")
