"""A cluster's time goes to exactly one cause at each moment, and its tokens make a rate."""

from __future__ import annotations

from random import Random

from dips.client.agent import metrics
from dips.client.agent.account import CAUSES, Pace, Tally
from dips.client.agent.state import STANDSTILL, AgentSettings, AgentState, ClusterIdentity, SyncPhase


def test_time_goes_to_one_cause() -> None:
    """The parts are the whole, also in the middle of one."""
    tally = Tally()
    for cause, at in (("start", 0.0), ("pull", 4.0), ("inner", 6.0), ("slot", 16.0), ("push", 17.0), ("window", 20.0)):
        tally.switch_cause(cause, at)
    spent = tally.seconds_by_cause(23.0)
    expected = {"start": 4.0, "pull": 2.0, "inner": 10.0, "slot": 1.0, "push": 3.0, "window": 3.0}
    assert {cause: seconds for cause, seconds in spent.items() if seconds} == expected
    assert sum(spent.values()) == 23.0


def test_the_end_of_a_window_is_the_update() -> None:
    """What the master says of its update is taken from the wait, and never more than was waited."""
    tally = Tally()
    tally.switch_cause("window", 0.0)
    tally.switch_cause("window", 5.0)
    tally.count_update(2.0)
    tally.switch_cause("pull", 5.0)
    assert (tally.seconds["window"], tally.seconds["update"]) == (3.0, 2.0)
    tally.switch_cause("window", 6.0)
    tally.switch_cause("window", 7.0)
    tally.count_update(100.0)
    tally.switch_cause("inner", 7.0)
    tally.count_update(100.0)  # the update of a round that nobody waited for
    assert (tally.seconds["window"], tally.seconds["update"]) == (3.0, 3.0)


def test_every_phase_has_a_cause() -> None:
    """A trainer that stands still does so for a cause that the metrics know."""
    assert set(STANDSTILL) == set(SyncPhase)
    assert set(STANDSTILL.values()) <= set(CAUSES)


def test_an_agent_without_a_trainer_tells_what_it_knows() -> None:
    """Before anything happened there are no losses and bases, and every name is said once."""
    settings = AgentSettings(ClusterIdentity("r", "c", "d"), 2.0, 1.0)
    state = AgentState(settings, Pace(steps=1), lambda: "nonce", Random(0))
    assert metrics.read_metrics(state, 5.0)["silent_s"] == 0.0
    state.membership.unreachable_since = 3.0
    assert metrics.read_metrics(state, 5.0)["silent_s"] == 2.0
    found = list(metrics.collect(metrics.read_metrics(state, 5.0)))
    assert len({family.name for family in found}) == len(found)
    optional = ("relay", "pipeline", "inside")  # of agents that have one
    empty = {f.name for f in found if not f.samples and not any(word in f.name for word in optional)}
    assert empty == {"dips_agent_loss", "dips_agent_base_version"}
    spent = next(f for f in found if f.name == "dips_agent_seconds")
    assert {s.labels["cause"] for s in spent.samples} == set(CAUSES)


def test_each_standstill_is_one_observation() -> None:
    """However often its cause is told again; of a wait that ends with an outer step the update has its share."""
    tally = Tally()
    for cause, now in (("inner", 0.0), ("push", 1.0), ("push", 2.0), ("window", 4.0), ("window", 9.0)):
        tally.switch_cause(cause, now)
    tally.count_update(2.0)
    tally.switch_cause("pull", 9.0)
    tally.switch_cause("inner", 10.0)
    seen = {cause: (w.list_buckets()[-1][1], w.total) for cause, w in tally.waits.items() if w.list_buckets()[-1][1]}
    assert seen == {"push": (1, 3.0), "window": (1, 3.0), "update": (1, 2.0), "pull": (1, 1.0)}


def test_no_seconds_are_taken_back_that_a_scrape_has_seen() -> None:
    """A window that turns out to be an update in part: Prometheus would take the smaller number for a new counter's."""
    tally = Tally()
    tally.switch_cause("window", 0.0)
    assert tally.seconds_by_cause(9.0)["window"] == 9.0
    tally.switch_cause("window", 10.0)
    tally.count_update(6.0)
    tally.switch_cause("inner", 10.0)
    spent = tally.seconds_by_cause(20.0)
    assert (spent["window"], spent["update"], spent["inner"]) == (9.0, 6.0, 10.0)
    tally.switch_cause("window", 20.0)
    spent = tally.seconds_by_cause(30.0)
    assert spent["window"] == 14.0 and sum(spent.values()) == 30.0
