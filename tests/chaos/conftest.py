"""Chaos: real processes, hurt at named moments; `make chaos` runs it, `make test` does not.

Tests of a file share a running deployment, so that each pays for its failure and not for the start of eight
processes; after a test that fails the next one gets a new deployment. Processes are forks of a server that has
imported what they need (tests/forkserver): they die as any process does, and come back in a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.deployment import Deployment
from tests.chaos.wires import Loop
from tests.forkserver.fixtures import end_of_servers, forked_commands, real_commands

__all__ = ["end_of_servers", "forked_commands", "real_commands"]
HERE = Path(__file__).parent
LIMIT_S = 300  # of a test with the start and the check of its deployment, on two cores that others use, too
TAIL = 30  # lines of each log, below a failure


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.chaos)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Remember on the test that it failed, for its deployment, and show what its processes said."""
    report = yield
    if report.failed:
        item.failed = True  # type: ignore[attr-defined]
        deployment = getattr(item, "funcargs", {}).get("deployment")
        for process in deployment.processes if deployment else ():
            report.sections.append((process.name, process.tail(TAIL)))
    return report


@pytest.fixture(scope="session")
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


class SharedDeployment:
    """The running deployment of a file."""

    def __init__(self, factory: pytest.TempPathFactory, loop: Loop, options: Mapping[str, Any]) -> None:
        self._factory, self._loop, self._options = factory, loop, options
        self.deployment: Deployment | None = None

    def get(self) -> Deployment:
        if self.deployment is None:
            self.deployment = Deployment(self._factory.mktemp("deployment"), self._loop, **self._options)
            self.deployment.start()
        return self.deployment

    def leave(self, error: BaseException | None = None) -> None:
        deployment, self.deployment = self.deployment, None
        if deployment is not None:
            deployment.__exit__(type(error) if error else None, error, None)


@pytest.fixture(scope="module")
def shared_deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loop: Loop
) -> Iterator[SharedDeployment]:
    """Of a file; its `DEPLOYMENT` says what differs from others."""
    shared = SharedDeployment(tmp_path_factory, loop, getattr(request.module, "DEPLOYMENT", {}))
    yield shared
    shared.leave()


@pytest.fixture
def deployment(shared_deployment: SharedDeployment, request: pytest.FixtureRequest) -> Iterator[Deployment]:
    """A running deployment, undamaged; whatever a test did to it, afterwards everything is compared with the ledger."""
    deployment = shared_deployment.get()
    yield deployment
    if getattr(request.node, "failed", False):
        shared_deployment.leave(RuntimeError("the test failed"))
        return
    try:
        for line in (*deployment.to_master.values(), *deployment.orders.values()):
            line.wire.heal()
        deployment.progress(2, by=deployment.clusters)
        deployment.check()
    except BaseException as error:
        shared_deployment.leave(error)
        raise
