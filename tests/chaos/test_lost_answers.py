"""An answer that is lost with its connection costs a question, never a contribution: the same key is asked again."""

from __future__ import annotations

import time

import pytest

from tests.chaos.house import SEEN_S, Deployment

CALLS = ["RequestPush", "FinishPush", "AwaitRound", "RequestPull", "FinishPull", "RequestRanges"]
ORDERS = ["open_push", "measure", "fold", "apply", "persist", "commit", "open_pull", "retire"]


@pytest.mark.parametrize("method", CALLS)
def test_an_answer_to_a_cluster_is_lost(house: Deployment, method: str) -> None:
    """The master did what was asked, the connection breaks before the answer: it is asked again and hears the same."""
    calls = house.to_master["east"].calls
    trap = calls.lose_answer(method)
    if method in ("RequestPull", "FinishPull"):
        house.kill_rank("east")  # a new rank pulls the head
    trap.caught()
    asked = calls.seen[method]
    house.until(lambda: calls.seen[method] > asked, SEEN_S, f"{method} is asked again")
    house.progress(2, by=("east",))
    assert not house.skipped()


def test_the_answer_to_join_is_lost(house: Deployment) -> None:
    """The same nonce gets the same incarnation: no incarnation is skipped, none is fenced by its own retry."""
    house.end_agent("east")
    inc, since = _inc(house), time.time()
    trap = house.to_master["east"].calls.lose_answer("Join")
    house.cluster("east")
    trap.caught()
    house.progress(2, by=("east",))
    assert house.seen_after(house.timeline("east"), "joined", since=since)["inc"] == inc + 1


@pytest.mark.parametrize("order", ORDERS)
def test_an_answer_to_the_master_is_lost(house: Deployment, order: str) -> None:
    """The slave carried the order out, the connection breaks: the order comes again, the work is not done twice."""
    calls = house.orders["ps0"].calls
    trap = calls.lose_answer(order)
    if order == "open_pull":
        house.kill_rank("east")
    trap.caught()
    house.progress(3, by=("east",))
    assert not house.skipped() and not house.marks(house.master_timeline, "slave_lost")


def test_the_answer_to_register_is_lost(house: Deployment) -> None:
    """The same nonce gets the same incarnation."""
    sinc = _sinc(house)
    house.process("ps0").kill()
    trap = house.to_master["ps0"].calls.lose_answer("Register")
    house.start_slave("ps0")
    trap.caught()
    house.progress(2)
    assert _sinc(house) == sinc + 1


@pytest.mark.parametrize("who", ["east", "ps1"])
def test_the_answer_to_a_heartbeat_is_lost(house: Deployment, who: str) -> None:
    """A heartbeat that is told again counts once: the house checks at the end that the tokens add up."""
    trap = house.to_master[who].calls.lose_answer("Heartbeat")
    trap.caught()
    house.progress(2, by=("east",))


def _inc(house: Deployment) -> int:
    return int(
        house.wait_for_status(lambda s: "east" in s["clusters"], SEEN_S, "the master knows east")["clusters"]["east"][
            "inc"
        ]
    )


def _sinc(house: Deployment) -> int:
    return int(
        house.wait_for_status(lambda s: s["slaves"]["ps0"].get("sinc"), SEEN_S, "the master knows ps0")["slaves"][
            "ps0"
        ]["sinc"]
    )
