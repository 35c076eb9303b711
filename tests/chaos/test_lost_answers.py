"""An answer that is lost with its connection costs a question, never a contribution: the same key is asked again."""

from __future__ import annotations

import time

import pytest

from tests.chaos.deployment import SEEN_S, Deployment

DEPLOYMENT = {"secure": True}
CALLS = ["RequestPush", "FinishPush", "AwaitRound", "RequestPull", "FinishPull", "RequestRanges"]
ORDERS = ["open_push", "measure", "fold", "apply", "persist", "commit", "open_pull", "retire"]


@pytest.mark.parametrize("method", CALLS)
def test_an_answer_to_a_cluster_is_lost(deployment: Deployment, method: str) -> None:
    """The master did what was asked, the connection broke before the answer: asked again, it answers the same."""
    calls = deployment.to_master["east"].calls
    trap = calls.lose_answer(method)
    if method in ("RequestPull", "FinishPull"):
        deployment.kill_rank("east")  # a new rank pulls the head
    trap.caught()
    asked = calls.seen[method]
    deployment.until(lambda: calls.seen[method] > asked, SEEN_S, f"{method} is asked again")
    deployment.progress(2, by=("east",))
    assert not deployment.skipped()


def test_the_answer_to_join_is_lost(deployment: Deployment) -> None:
    """The same nonce gets the same incarnation: no incarnation is skipped, none is fenced by its own retry."""
    deployment.end_agent("east")
    inc, since = _inc(deployment), time.time()
    trap = deployment.to_master["east"].calls.lose_answer("Join")
    deployment.cluster("east")
    trap.caught()
    deployment.progress(2, by=("east",))
    assert deployment.seen_after(deployment.timeline("east"), "joined", since=since)["inc"] == inc + 1


@pytest.mark.parametrize("order", ORDERS)
def test_an_answer_to_the_master_is_lost(deployment: Deployment, order: str) -> None:
    """The slave carried the order out, the connection breaks: the order comes again, the work is not done twice."""
    calls = deployment.orders["ps0"].calls
    trap = calls.lose_answer(order)
    if order == "open_pull":
        deployment.kill_rank("east")
    trap.caught()
    deployment.progress(3, by=("east",))
    assert not deployment.skipped() and not deployment.marks(deployment.master_timeline, "slave_lost")


def test_the_answer_to_register_is_lost(deployment: Deployment) -> None:
    """The same nonce gets the same incarnation."""
    sinc = _sinc(deployment)
    deployment.process("ps0").kill()
    trap = deployment.to_master["ps0"].calls.lose_answer("Register")
    deployment.start_slave("ps0")
    trap.caught()
    deployment.progress(2)
    assert _sinc(deployment) == sinc + 1


@pytest.mark.parametrize("who", ["east", "ps1"])
def test_the_answer_to_a_heartbeat_is_lost(deployment: Deployment, who: str) -> None:
    """A heartbeat that is sent again counts once: the deployment checks at the end that the tokens add up."""
    trap = deployment.to_master[who].calls.lose_answer("Heartbeat")
    trap.caught()
    deployment.progress(2, by=("east",))


def _inc(deployment: Deployment) -> int:
    return int(
        deployment.wait_for_status(lambda s: "east" in s["clusters"], SEEN_S, "the master knows east")["clusters"][
            "east"
        ]["inc"]
    )


def _sinc(deployment: Deployment) -> int:
    return int(
        deployment.wait_for_status(lambda s: s["slaves"]["ps0"].get("sinc"), SEEN_S, "the master knows ps0")["slaves"][
            "ps0"
        ]["sinc"]
    )
