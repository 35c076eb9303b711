"""The deployments that are attacked, and the table of what came of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.deployment import AttackedRun, Row
from tests.forkserver.fixtures import end_of_servers, forked_commands, python_of_scripts, real_commands

__all__ = ["end_of_servers", "forked_commands", "python_of_scripts", "real_commands"]

ROWS: list[Row] = []
MEMORY: list[str] = []


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedRun]:
    with AttackedRun(tmp_path_factory.mktemp("attacks") / "secured", secured=True) as deployment:
        yield deployment
    ROWS.extend(deployment.rows)
    MEMORY.append(deployment.describe_memory())


@pytest.fixture(scope="module")
def leasing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedRun]:
    """Its clusters train on data that the run owns; it ends after 10⁹ tokens: never, while clusters are honest."""
    options = {"data": {"ranges": 1_000_000, "digest": ""}, "stop": {"tokens": 10**9}}
    directory = tmp_path_factory.mktemp("attacks") / "leasing"
    with AttackedRun(directory, True, "ranges:2", options, {"keep_every": 5}) as deployment:
        yield deployment
    ROWS.extend(deployment.rows)
    MEMORY.append(deployment.describe_memory())


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedRun]:
    with AttackedRun(tmp_path_factory.mktemp("attacks") / "plain", secured=False) as deployment:
        yield deployment
    ROWS.extend(deployment.rows)
    MEMORY.append(deployment.describe_memory())


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedRun]:
    """Its master has a mirror, so that another one may stand by."""
    directory = tmp_path_factory.mktemp("attacks") / "mirrored"
    with AttackedRun(directory, secured=False, master={"mirror": "mirror"}) as deployment:
        yield deployment
    ROWS.extend(deployment.rows)
    MEMORY.append(deployment.describe_memory())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not ROWS:
        return
    header = Row("attack", "with the certificate of", "refused by", "counted")
    rows = [(r.attack, r.certificate, r.refused_by, r.counter) for r in (header, *ROWS)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    terminalreporter.section(f"{len(ROWS)} attacks, all refused")
    for row in rows:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
    for line in MEMORY:
        terminalreporter.write_line(line)
