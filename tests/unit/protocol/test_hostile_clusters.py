"""What one enrolled cluster may do to the others: nothing, whatever it says (docs/guides/threats.md)."""

from __future__ import annotations

from dips.errors import ConfigError, UnavailableSlave
from dips.protocol import events as ev
from dips.protocol.effects import Dropped, Failed, OpenPush, Pending
from dips.protocol.seeding import SEEDER
from tests.unit.protocol.scripted_run import ScriptedRun


def test_nobody_has_the_seeders_name() -> None:
    """Its reports would be taken for those of `dips seed`."""
    run = ScriptedRun()
    answer = run.ask(ev.ClusterJoined(0, SEEDER, "p", "r", run.manifest.digest, "c"))
    assert isinstance(answer, Failed) and answer.error is ConfigError and SEEDER not in run.view["clusters"]


def test_a_push_that_moved_before_its_grant_is_not_committed() -> None:
    """It is staged everywhere, but a slave's answer to OpenPush is lost, and then that slave refuses it."""
    run = ScriptedRun()
    run.train("a")
    run.held = {OpenPush}
    push = run.open_push("a")
    assert isinstance(run.commit(push), Pending)
    (order,) = run.orders
    run.orders.clear()
    run.step(ev.OrderFailed(order.slave, order.sinc, order.number, UnavailableSlave, "gone"))
    assert isinstance(run.ask(ev.PushFinished(0, push, 100, 1, (), 2.5)), Dropped)
