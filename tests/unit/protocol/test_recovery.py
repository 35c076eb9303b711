"""`dips recover` over the lanes: a version of θ of a file, made when a slave has lost the head, or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dips.errors import ConfigError
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.data import Intervals
from dips.protocol.effects import (
    Acknowledged,
    Dropped,
    DropPush,
    Effect,
    Failed,
    Hold,
    KeepSeed,
    LoadVersion,
    OpenPush,
    Order,
    Pending,
    Refused,
    Registered,
    Reply,
    Retire,
    SeedGranted,
)
from dips.protocol.enums import SlaveCause
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import Options, StopOptions
from dips.protocol.records import (
    LedgerState,
    RolledBack,
    RoundReserved,
    RunRow,
    ScoreHistory,
    VersionCommitted,
    VersionRecovered,
    VersionRow,
)
from dips.protocol.releases import PROTOCOL

MODEL = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (10,)),)) for i in range(3)))
PLACED = (("s", (0, 2)), ("t", (1,)))
OLDER, HEAD, MADE = VersionId(2, 3), VersionId(9, 12), VersionId(10, 14)
NOTHING_LOST = Refused(
    0.0,
    f"every slave has {HEAD}: nothing is lost; one that began with an empty disk just now is known to lack it when it "
    "has registered",
)
DIGESTS = ("of 0", "of 1", "of 2")


class Lost:
    """A run whose head was v9@r12; `s` has it, `t` comes with what `holds` says."""

    def __init__(
        self, *holds: VersionId, protocol: int = PROTOCOL, options: Options = Options(), retired: bool = True
    ) -> None:
        row = RunRow("r", "c", MODEL.to_json(), PLACED, ("0" * 32,) * 3, (1.0,) * 3)
        versions = (
            VersionRow(GENESIS, GENESIS, True, 0, False),
            VersionRow(VersionId(1, 1), GENESIS, True, 1, True),
            VersionRow(OLDER, VersionId(1, 1), True, 4, retired),
            VersionRow(HEAD, OLDER, True, 7, False),
        )
        state = LedgerState(
            replace(row, protocol=protocol), 1, 14, versions, (), (), (), (), ScoreHistory((), (1.0,)), (), Intervals(),
            None,
        )  # fmt: skip
        self.now, self._req, self.effects = 0.0, 0, list[Effect]()
        self.machine = Coordinator(state, MODEL, options, self.now)
        self.register("s", HEAD)
        self.holds = holds
        self.register("t", *holds)

    def step(self, event: Any) -> list[Effect]:
        made = self.machine.step(event, self.now)
        self.effects += made
        return made

    def ask(self, question: Any) -> Any:
        self._req += 1
        made = self.step(replace(question, req=self._req))
        return next(e.result for e in made if isinstance(e, Reply) and e.req == self._req)

    def register(
        self, slave: str, *complete: VersionId, nonce: str = "", mirror: ev.MirrorReport | None = None,
        memory: VersionId | None = None,
    ) -> Any:  # fmt: skip
        registered = self.ask(
            ev.SlaveRegistered(
                0, slave, nonce or f"n-{slave}", "r", f"{slave}:1", (f"{slave}:2",), 0, memory, None, complete, 2, "",
                mirror=mirror,
            )
        )  # fmt: skip
        assert isinstance(registered, Registered)
        return registered.order

    def recover(self, seeder: str = "p", digests: tuple[str, ...] = DIGESTS, **more: Any) -> Any:
        question = ev.RecoverAsked(0, seeder, digests, "saved.safetensors", **more)
        return self.ask(ev.OperatorAsked(0, "alice.operator", 1e9, question))

    def orders(self, kind: type) -> list[Order]:
        return [e for e in self.effects if isinstance(e, Order) and isinstance(e.body, kind)]

    def answer(self, order: Order, answer: Any = None) -> None:
        self.step(ev.OrderAnswered(order.slave, order.sinc, order.number, answer or ev.Done()))

    def open(self) -> PushId:
        """Ask until the transfer is granted."""
        before = len(self.orders(OpenPush))
        assert self.recover() == Pending("the slaves are making room for it")
        for order in self.orders(OpenPush)[before:]:
            self.answer(order)
        granted = self.recover()
        assert isinstance(granted, SeedGranted)
        assert {s.name for s in granted.grant.slaves} == {"s", "t"}
        return granted.push

    def stage(self, push: PushId, *slaves: str) -> list[Order]:
        before = len(self.orders(KeepSeed))
        for slave in slaves:
            sinc = next(o.sinc for o in reversed(self.orders(OpenPush)) if o.slave == slave)
            self.step(ev.PushStaged(slave, sinc, push, 40))
        return self.orders(KeepSeed)[before:]

    def records(self, kind: type) -> list[Any]:
        return [e for e in self.effects if isinstance(e, kind)]


def test_a_saved_model_becomes_the_version_after_the_head() -> None:
    """Its round is reserved before anything moves; its row is written when it is on all disks, and all load it."""
    run = Lost()
    push = run.open()
    assert [r.round for r in run.records(RoundReserved)] == [MADE.round]
    keeps = {o.slave: o for o in run.stage(push, "s", "t")}
    assert keeps["s"].body == KeepSeed(push, MADE, ("of 0", "of 2"))
    assert keeps["t"].body == KeepSeed(push, MADE, ("of 1",))
    run.answer(keeps["t"], ev.ModelKept("manifest of t", None))
    assert not run.records(VersionCommitted)
    assert run.recover() == Pending("being written to the disk: s")
    run.answer(keeps["s"], ev.ModelKept("manifest of s", HEAD))
    (row,), (told,) = run.records(VersionCommitted), run.records(VersionRecovered)
    assert (row.version, row.parent, row.durable, row.folds, row.penalty) == (MADE, HEAD, True, (), ())
    assert dict(row.digests) == {"s": "manifest of s", "t": "manifest of t"} and row.history == ScoreHistory((), (1.0,))
    assert told == VersionRecovered(MADE, "saved.safetensors", ("l1",))
    assert run.machine.head() == MADE
    assert {o.slave for o in run.orders(DropPush)} == {"s", "t"}, "their slots are free again"
    assert run.recover(version=MADE) == Acknowledged()
    for slave in "st":
        assert run.register(slave, HEAD, MADE) == LoadVersion(MADE)


def test_a_recovered_version_may_be_the_last() -> None:
    """The run is at its end with it: no cluster trains towards another one."""
    run = Lost(options=Options(stop=StopOptions(versions=MADE.version)))
    for order in run.stage(run.open(), "s", "t"):
        run.answer(order, ev.ModelKept("m", None))
    assert run.machine.head() == MADE and run.machine.progress().finished == MADE


def test_the_round_of_a_recovered_version_is_counted() -> None:
    """The rounds applied in status, page and metrics lacked it, until the next master read its row."""
    run = Lost()
    for order in run.stage(run.open(), "s", "t"):
        run.answer(order, ev.ModelKept("m", None))
    assert run.machine.build_view(run.now).rounds.applied == 1


def test_a_second_try_has_another_name() -> None:
    """The first may have left half of its version on a disk: two contents never have one name."""
    run = Lost()
    first = run.open()
    (keep,) = run.stage(first, "s")
    run.answer(keep, ev.ModelKept("manifest of s", HEAD))
    run.register("t", nonce="another process")
    assert isinstance(run.recover(), Dropped)
    second = run.open()
    keeps = run.stage(second, "s", "t")
    assert {o.body.version for o in keeps} == {VersionId(MADE.version, MADE.round + 1)}
    for order in keeps:
        run.answer(order, ev.ModelKept("m", None))
    assert [r.version for r in run.records(VersionCommitted)] == [VersionId(MADE.version, MADE.round + 1)]


def test_what_a_try_has_written_is_deleted_when_it_is_dropped() -> None:
    """Each try has another name: a slave without the head is never told to hold it, and tries that broke filled the
    disks of the others, so that no later one could succeed.
    """
    run = Lost()
    push = run.open()
    (keep,) = run.stage(push, "s")
    run.answer(keep, ev.ModelKept("manifest of s", HEAD))
    assert not run.orders(Retire)
    run.register("t", nonce="another process")
    assert [(o.slave, o.body) for o in run.orders(Retire)] == [("s", Retire((MADE,)))], "t was told to write nothing"
    assert isinstance(run.recover(), Dropped)
    push = run.open()
    run.stage(push, "s", "t")
    run.step(ev.PushRefused("t", run.orders(OpenPush)[-1].sinc, push, "stalled"))
    assert [o.slave for o in run.orders(Retire)[1:]] == ["s", "t"], "also where it is being written"


def test_a_disk_that_comes_back_ends_it() -> None:
    """The true directory is put back meanwhile: the head is what it was, and nothing is recovered any more."""
    run = Lost()
    run.open()
    assert run.register("t", HEAD, nonce="with its disk") == LoadVersion(HEAD)
    assert isinstance(run.recover(), Dropped)
    assert run.recover() == NOTHING_LOST
    assert not run.records(VersionCommitted) and run.machine.head() == HEAD


def test_a_common_version_that_comes_back_ends_it() -> None:
    """Both find it on their disks meanwhile, and the run goes back to it: the file's would not follow it."""
    run = Lost(options=Options(most_rollback=100), retired=False)
    run.open()
    run.register("s", OLDER, HEAD)
    assert run.register("t", OLDER) == LoadVersion(OLDER) and run.machine.head() == OLDER
    assert run.register("s", OLDER, HEAD) == LoadVersion(OLDER)
    assert len(run.records(RolledBack)) == 1, "nobody lacks the head any more"
    assert run.recover() == Dropped(f"the head is {OLDER} now")


def test_a_transfer_goes_on_beside_slaves_that_are_asked_what_they_hold() -> None:
    """The mirror of the slave that lost the head is mounted while the others make room: they register anew, as the same
    processes, and their answers count.
    """
    run = Lost(OLDER, retired=False)
    assert run.register("s", OLDER, HEAD, memory=HEAD) == Hold()
    assert run.recover() == Pending("the slaves are making room for it")
    run.register("t", OLDER, mirror=ev.MirrorReport((HEAD,)))
    assert run.machine.build_view(run.now).slaves["s"].cause is SlaveCause.OFFERS
    for order in run.orders(OpenPush):
        run.answer(order)
    assert isinstance(run.recover(), SeedGranted)


def test_a_transfer_is_among_the_live_ones_of_a_slave_that_serves() -> None:
    """One with an old disk leaves the rollback to a person, and the others serve on. They dropped the model with their
    next heartbeat, as no live transfer, so that only a small one was ever recovered.
    """
    run = Lost(OLDER, retired=False)
    assert run.register("s", OLDER, HEAD, memory=HEAD) == Hold()
    before = run.machine.slave_live("s", 1)[2]
    push = run.open()
    must_register, as_of, live = run.machine.slave_live("s", 1)
    assert not must_register and as_of >= run.orders(OpenPush)[-1].number
    assert live.pushes == (push,) and live.number > before.number
    run.step(ev.PushRefused("t", run.orders(OpenPush)[-1].sinc, push, "stalled"))
    over = run.machine.slave_live("s", 1)[2]
    assert over.pushes == () and over.number > live.number


def test_a_mirror_that_brings_the_head_back_ends_it() -> None:
    """The slave that had lost the head has it again, in the same process: the file's model does not replace it."""
    run = Lost()
    push = run.open()
    (keep,) = run.stage(push, "s")
    run.answer(keep, ev.ModelKept("manifest of s", HEAD))
    assert run.register("t", HEAD) == LoadVersion(HEAD)
    assert isinstance(run.recover(), Dropped)
    assert run.recover() == NOTHING_LOST
    assert not run.stage(push, "t") and not run.records(VersionCommitted)


def test_a_process_that_is_silent_gives_its_place_up() -> None:
    """A lease after it asked last, although nothing else happens at that time."""
    run = Lost()
    run.open()
    assert "another process brings a model" in run.recover(seeder="q").reason
    assert run.machine.next_deadline() == run.now + Options().timing.lease_s
    run.now += Options().timing.lease_s
    run.step(ev.Ticked())
    assert run.recover(seeder="q") == Pending("the slaves are making room for it")


def test_requests_that_cannot_be() -> None:
    """Nothing is lost; a slave is away; a model of other layers; a run that the former release may take part in."""
    assert Lost(HEAD).recover() == NOTHING_LOST
    short = Lost().recover(digests=("one",))
    assert isinstance(short, Failed) and short.error is ConfigError and "of 3 layers, got 1" in short.message
    refused = Lost(protocol=1).recover()
    assert isinstance(refused, Refused) and "dips finalise" in refused.reason
    run = Lost()
    run.step(ev.SlaveSilent("t", 1, 99.0))
    assert run.recover() == Pending("not here: t")
    assert run.register("s", HEAD) == LoadVersion(HEAD), "what t holds is not known: nobody waits for a disk"


@pytest.mark.parametrize("late", [False, True])
def test_what_a_disk_refuses_drops_it(late: bool) -> None:
    """A full disk, before or behind the others: there is no version, and the run waits as before."""
    run = Lost()
    push = run.open()
    keeps = {o.slave: o for o in run.stage(push, "s", "t")}
    if late:
        run.answer(keeps["s"], ev.ModelKept("manifest of s", HEAD))
    bad = keeps["t"]
    run.step(ev.OrderFailed(bad.slave, bad.sinc, bad.number, ConfigError, "no space left"))
    assert isinstance(run.recover(), Dropped)
    assert not run.records(VersionCommitted) and run.machine.head() == HEAD


def test_a_slave_that_gives_the_transfer_up_drops_it() -> None:
    """Its word is heard once, and only from its present process, on the present transfer."""
    run = Lost()
    push = run.open()
    sinc = run.orders(OpenPush)[0].sinc
    for stale in ((sinc + 1, push), (sinc, replace(push, seq=push.seq - 1))):
        run.step(ev.PushRefused("s", *stale, "stalled"))
        run.step(ev.PushStaged("s", *stale, 40))
        assert isinstance(run.recover(), SeedGranted) and not run.orders(KeepSeed)
    for _ in range(2):
        run.step(ev.PushRefused("s", sinc, push, "stalled"))
    assert run.recover() == Dropped("s: stalled")
    assert run.recover() == Pending("the slaves are making room for it")


@pytest.mark.parametrize("kept", [False, True])
def test_an_answer_about_a_transfer_that_is_over_opens_and_makes_nothing(kept: bool) -> None:
    """One slave gives it up while the other still makes room for it, or writes it down."""
    run = Lost()
    if kept:
        push = run.open()
        (late,) = run.stage(push, "s")
    else:
        run.recover()
        _, late = orders = run.orders(OpenPush)
        push = orders[0].body.push
        run.answer(orders[0])
    run.step(ev.PushRefused("t", run.orders(OpenPush)[1].sinc, push, "stalled"))
    run.answer(late, ev.ModelKept("manifest of s", HEAD) if kept else None)
    assert run.recover() == Dropped("t: stalled") and not run.records(VersionCommitted)


def test_a_model_that_is_staged_before_it_was_granted_is_not_kept() -> None:
    """A slave that says so lies. All of them were told to keep it, the transfer ended, and their answers to the order
    to make room for it ended the master.
    """
    run = Lost()
    run.recover()
    opened = run.orders(OpenPush)
    for order in opened:
        assert not run.stage(order.body.push, order.slave)
    for order in opened:
        run.answer(order)
    assert isinstance(run.recover(), SeedGranted)
    assert len(run.stage(opened[0].body.push, "s", "t")) == 2, "and it goes on"


def test_a_model_that_is_kept_without_a_digest_drops_it() -> None:
    """A slave answers with another kind of answer, which ended the master."""
    run = Lost()
    keeps = {o.slave: o for o in run.stage(run.open(), "s", "t")}
    run.answer(keeps["s"], ev.ModelKept("manifest of s", HEAD))
    run.answer(keeps["t"], ev.Done())
    said = run.recover()
    assert isinstance(said, Dropped) and "expected ModelKept" in said.reason
    assert not run.records(VersionCommitted) and run.machine.head() == HEAD
