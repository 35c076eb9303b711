"""When a slave registers, and what each answer means: the pure core, with time as an argument."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import inf
from random import Random

import pytest

from dips.errors import (
    Busy,
    ConfigError,
    Denied,
    FailedDisk,
    FailedMirror,
    LocalProtocolError,
    StaleTerm,
    UnavailableMaster,
)
from dips.ids import GENESIS, PushId, VersionId
from dips.protocol.effects import Hold, LoadVersion, Registered, RegisterLater, SlaveOrder
from dips.protocol.events import MirrorReport, SlaveRegistered
from dips.protocol.heartbeats import LiveTransfers, SlaveHeartbeat, SlaveHeartbeatAnswer
from dips.slave.mirror_plan import Restored
from dips.slave.ports import (
    CallMaster,
    EndSlave,
    Meters,
    ReadSnapshot,
    RestoreFromMirror,
    ShardMethod,
    ShardWork,
    SlaveAction,
    SlaveIdentity,
    SlaveTiming,
    Standing,
    WriteLog,
)
from dips.slave.registration import Heartbeats, Registration, RegistrationPhase
from dips.slave.shard import Followed, Unfollowed

WHO = SlaveIdentity("run", "s", "nonce", "h:1", ("h:2",), "m:1")
TIMING = SlaveTiming(heartbeat_s=2.0, call_s=10.0, backoff_s=(0.2, 5.0))
SAID = SlaveRegistered(0, "s", "nonce", "run", "h:1", ("h:2",), 0, None, None, (), 2, "")
DESCRIBE = ShardWork(ShardMethod.DESCRIBE, (WHO, ()))


def registered(order: SlaveOrder, term: int = 1) -> Registered:
    return Registered(term, 7, order, GENESIS, (0,), ("",), "{}")


class RegistrationRig:
    """A registration and its heartbeats, with a standing that the test sets."""

    def __init__(self, timing: SlaveTiming = TIMING) -> None:
        self.standing = Standing(7, 1, GENESIS, (), 0, 0, serves=True)
        self.registration = Registration(WHO, timing, Random(1))
        self.heartbeats = Heartbeats(
            WHO, timing, self.registration, lambda: self.standing, tuple, Meters, lambda now: ()
        )

    def answer(self, order: SlaveOrder, followed: Followed | Unfollowed, now: float) -> list[SlaveAction]:
        """The whole way from a Register to the shard's report; what follows from it."""
        assert self.registration.on_described(SAID, now) == [CallMaster(SAID, 10.0)]
        told = registered(order)
        assert self.registration.on_registered(told, now) == [ShardWork(ShardMethod.WELCOME, (told,))]
        assert self.registration.on_welcomed(None, now) == [ShardWork(ShardMethod.FOLLOW, (order,))]
        return work_of(self.registration.on_followed(followed, now))

    def serving(self) -> RegistrationRig:
        assert self.registration.tick(0.0) == [DESCRIBE]
        assert self.answer(Hold(), Followed.SERVES, 0.0) == []
        return self

    def heartbeat(self, now: float) -> SlaveHeartbeat:
        """The heartbeat that is due now."""
        (call,) = self.heartbeats.tick(now)
        assert isinstance(call, CallMaster)
        assert isinstance(call.message, SlaveHeartbeat)
        return call.message


def drop_unlisted(answer: SlaveHeartbeatAnswer) -> ShardWork:
    return ShardWork(ShardMethod.DROP_UNLISTED, (answer,))


def work_of(actions: list[SlaveAction]) -> list[SlaveAction]:
    return [action for action in actions if not isinstance(action, WriteLog)]


def test_load_is_followed_by_another_register_at_once_and_hold_by_none() -> None:
    """Each order but Hold leads to a Register that says what is held now."""
    slave = RegistrationRig()
    assert slave.registration.tick(0.0) == [DESCRIBE]
    assert slave.registration.tick(1.0) == []
    assert slave.answer(LoadVersion(GENESIS), Followed.DONE, 1.0) == [DESCRIBE]
    assert slave.answer(Hold(), Followed.SERVES, 2.0) == []
    assert slave.registration.phase is RegistrationPhase.SERVING
    assert slave.registration.next_deadline() == inf


def test_a_snapshot_is_read_beside_the_shard() -> None:
    """The shard only begins a load; while the disk reads, no other Register leaves, and its end is the shard's."""
    slave, order = RegistrationRig(), LoadVersion(GENESIS)
    slave.registration.tick(0.0)
    slave.registration.on_described(SAID, 0.0)
    slave.registration.on_registered(registered(order), 0.0)
    slave.registration.on_welcomed(None, 0.0)
    read = partial(print, "what reads the snapshot")
    assert slave.registration.on_followed(read, 0.0) == [ReadSnapshot(order, read)]
    assert slave.registration.tick(100.0) == slave.registration.request_again(1, 100.0) == []
    broken = OSError("bad sector")
    for error in (broken, None):
        assert slave.registration.on_read(order, error) == [ShardWork(ShardMethod.END_LOAD, (order, error))]
    assert work_of(slave.registration.on_followed(Followed.DONE, 100.0)) == [DESCRIBE]


def with_mirror() -> Registration:
    """A registration whose slave has a mirror, asked for the first time what it holds."""
    meters = Meters(mirror=MirrorReport((), ""))
    registration = Registration(WHO, TIMING, Random(1), lambda: meters)
    assert registration.tick(0.0) == [DESCRIBE]
    return registration


def test_a_slave_that_serves_nothing_looks_into_its_mirror_before_each_register() -> None:
    """What came back is described, why no more did goes to the master; one that serves asks its memory only."""
    registration = with_mirror()
    v2 = VersionId(2, 5)
    old = replace(SAID, complete=(VersionId(1, 1),), reason="LoadVersion v2@r5: bad sector")
    (look,) = registration.on_described(old, 0.0)
    assert look == RestoreFromMirror(old.complete)
    assert registration.on_restored(look, Restored((v2,), "v1@r1 is damaged there"), 1.0) == [DESCRIBE]
    now = replace(old, complete=(VersionId(1, 1), v2))
    (call,) = registration.on_described(now, 1.0)
    assert call.message.complete == now.complete
    assert call.message.reason == "LoadVersion v2@r5: bad sector; v1@r1 is damaged there"
    assert registration.on_described(now, 2.0) == [RestoreFromMirror(now.complete)]
    (call,) = registration.on_described(replace(now, memory=v2), 2.0)
    assert isinstance(call, CallMaster)


def test_one_that_serves_looks_for_what_the_master_asks() -> None:
    """Once before each Register, until the answer asks no more; a mirror that fails keeps nobody from registering."""
    registration, v2 = with_mirror(), VersionId(2, 5)
    serving = replace(SAID, memory=VersionId(3, 6))
    (call,) = registration.on_described(serving, 0.0)
    registration.on_registered(registered(RegisterLater(1.0, "v2 is lacking", (v2,))), 0.0)
    registration.on_followed(Followed.WAITS, 0.0)
    read_v2 = ShardWork(ShardMethod.DESCRIBE, (WHO, (v2,)))
    assert registration.tick(1.0) == [read_v2]
    (look,) = registration.on_described(replace(serving, unread=(VersionId(1, 1),)), 1.0)
    assert look == RestoreFromMirror((VersionId(1, 1),), (v2,)), "what is not read is not missing"
    told, describe = registration.on_restored(look, FailedMirror("it is away"), 1.0)
    assert isinstance(told, WriteLog) and describe == read_v2
    (call,) = registration.on_described(serving, 1.0)
    assert isinstance(call, CallMaster) and call.message.reason == "it is away"
    registration.on_registered(registered(Hold()), 1.0)
    registration.on_followed(Followed.SERVES, 1.0)
    registration.request_again(registration.number, 2.0)
    assert isinstance(registration.on_described(serving, 2.0)[0], CallMaster)


def test_what_the_disk_has_is_not_looked_for_in_the_mirror() -> None:
    """An archive that the master asks for is read where it is; a mirror that is away does not delay that."""
    registration, v2 = with_mirror(), VersionId(2, 5)
    serving = replace(SAID, memory=VersionId(3, 6), unread=(v2,))
    registration.on_described(serving, 0.0)
    registration.on_registered(registered(RegisterLater(1.0, "v2 is to be read", (v2,))), 0.0)
    registration.on_followed(Followed.WAITS, 0.0)
    registration.tick(1.0)
    (call,) = registration.on_described(replace(serving, complete=(v2,), unread=()), 1.0)
    assert isinstance(call, CallMaster) and call.message.complete == (v2,)


@pytest.mark.parametrize(
    ("failed", "event", "reason"),
    [
        (FailedMirror("mirror: /m is not there: mount it"), "mirror_fails", "mirror: /m is not there: mount it"),
        (
            OSError(28, "No space left on device"),
            "restore_fails",
            "its disk takes no version from its mirror: [Errno 28] No space left on device",
        ),
        (
            FailedDisk("/s/0: No space left on device"),
            "restore_fails",
            "its disk takes no version from its mirror: /s/0: No space left on device",
        ),
    ],
)
def test_with_an_empty_disk_and_no_restore_it_does_not_register(failed: Exception, event: str, reason: str) -> None:
    """Who registers with nothing could make the run begin anew; with an old snapshot it says why there is no newer."""
    registration = with_mirror()
    (look,) = registration.on_described(SAID, 0.0)
    (told,) = registration.on_restored(look, failed, 0.0)
    assert isinstance(told, WriteLog)
    assert (told.level, told.event, told.fields["reason"]) == ("error", "restore_waits", reason)
    assert registration.tick(registration.next_deadline()) == [DESCRIBE]
    (look,) = registration.on_described(replace(SAID, complete=(VersionId(1, 1),)), 1.0)
    told, describe = registration.on_restored(look, failed, 1.0)
    assert isinstance(told, WriteLog) and (told.event, describe) == (event, DESCRIBE)
    (call,) = registration.on_described(replace(SAID, complete=(VersionId(1, 1),)), 1.0)
    assert call.message.reason == reason


def test_wait_is_obeyed_to_the_second_and_a_failed_order_waits_the_longest_pause() -> None:
    """A master that restores says when to ask again; a snapshot that cannot be loaded is no reason to hurry."""
    slave = RegistrationRig()
    slave.registration.tick(0.0)
    assert slave.answer(RegisterLater(3.0, "restoring"), Followed.WAITS, 1.0) == []
    assert slave.registration.next_deadline() == 4.0
    assert slave.registration.tick(4.0) == [DESCRIBE]
    assert slave.answer(LoadVersion(GENESIS), Unfollowed("its digest is wrong"), 5.0) == []
    assert slave.registration.next_deadline() == 10.0


def test_what_a_slave_waits_for_is_logged_when_it_changes() -> None:
    """It asks again each second, perhaps for hours."""
    registration, logged = RegistrationRig().registration, []
    for now, why in enumerate("aabba"):
        registration.tick(now)
        registration.on_described(SAID, now)
        registration.on_registered(registered(RegisterLater(1.0, why)), now)
        registration.on_welcomed(None, now)
        logged += [a.fields["why"] for a in registration.on_followed(Followed.WAITS, now) if isinstance(a, WriteLog)]
    assert logged == ["a", "b", "a"]


@pytest.mark.parametrize("error", [UnavailableMaster("away"), Busy("full"), StaleTerm("old ledger"), OSError("disk")])
def test_what_may_pass_is_tried_again_with_backoff(error: Exception) -> None:
    """Pauses double from 0.2 s to 5 s, and begin anew after an answer."""
    slave, now, pauses = RegistrationRig(), 0.0, []
    for _ in range(7):
        assert slave.registration.tick(now) == [DESCRIBE]
        slave.registration.on_described(SAID, now)
        assert work_of(slave.registration.on_registered(error, now)) == []
        pauses.append(slave.registration.next_deadline() - now)
        now = slave.registration.next_deadline()
    full_s = [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert all(full / 2 <= pause <= full for pause, full in zip(pauses, full_s, strict=True))
    slave.registration.tick(now)
    slave.answer(RegisterLater(1.0, "not yet"), Followed.WAITS, now)
    slave.registration.tick(now + 1.0)
    slave.registration.on_described(error, now + 1.0)
    assert now + 1.1 <= slave.registration.next_deadline() <= now + 1.2


@pytest.mark.parametrize(
    "error", [ConfigError("no such slave"), LocalProtocolError("our bug"), Denied("a certificate of nobody")]
)
def test_a_refusal_for_good_ends_the_slave(error: Exception) -> None:
    """Whether the master or the slave's own memory says so."""
    slave = RegistrationRig()
    slave.registration.tick(0.0)
    slave.registration.on_described(SAID, 0.0)
    assert slave.registration.on_registered(error, 0.0) == [EndSlave(error)]
    assert slave.registration.on_welcomed(error, 0.0) == [EndSlave(error)]


def test_who_was_let_in_once_waits_for_its_certificate() -> None:
    """A certificate that ended, or was replaced a moment late, ended the slave: the renewed one found nobody."""
    slave, expired = RegistrationRig().serving(), Denied("the certificate of slave 's' expired")
    slave.heartbeats.tick(0.0)
    slave.heartbeat(2.0)
    (told,) = slave.heartbeats.on_answer(expired, 2.1)
    assert isinstance(told, WriteLog)
    assert told.event == "heartbeat_refused"
    slave.heartbeat(4.0)
    assert work_of(slave.heartbeats.on_answer(SlaveHeartbeatAnswer(1, 8.0, True, 0), 4.1)) == [DESCRIBE]
    slave.registration.on_described(SAID, 4.1)
    assert work_of(slave.registration.on_registered(expired, 4.1)) == []
    assert slave.registration.phase is RegistrationPhase.PAUSED


def test_a_refusal_after_silence_is_logged() -> None:
    """Revoked while its master was away, a slave said for ever that this was silent, and nobody why it was lost."""
    slave, said = RegistrationRig().serving(), list[str]()
    slave.heartbeats.tick(0.0)
    errors = UnavailableMaster("gone"), Denied("is revoked"), Denied("is revoked"), UnavailableMaster("gone")
    for now, error in enumerate(errors, 1):
        slave.heartbeat(2.0 * now)
        said += [told.event for told in slave.heartbeats.on_answer(error, 2.0 * now) if isinstance(told, WriteLog)]
    assert said == ["master_silent", "heartbeat_refused", "master_silent"]


def test_the_answer_of_an_old_master_is_not_followed() -> None:
    """The shard has seen a later term: the order in the answer is forgotten, and the slave asks again."""
    slave = RegistrationRig()
    slave.registration.tick(0.0)
    slave.registration.on_described(SAID, 0.0)
    slave.registration.on_registered(registered(LoadVersion(GENESIS), term=1), 0.0)
    assert work_of(slave.registration.on_welcomed(StaleTerm("term 2 was seen"), 0.0)) == []
    assert slave.registration.phase is RegistrationPhase.PAUSED


def test_one_heartbeat_at_a_time_every_two_seconds() -> None:
    """The next is due two seconds after the last began, or as soon as that has ended."""
    slave = RegistrationRig().serving()
    assert slave.heartbeats.tick(0.0) == []
    slave.heartbeat(2.0)
    assert slave.heartbeats.tick(4.0) == []
    slave.heartbeats.on_answer(UnavailableMaster("slow"), 5.0)
    assert slave.heartbeats.next_deadline() == 5.0
    slave.heartbeat(5.0)
    slave.heartbeats.on_answer(UnavailableMaster("slow"), 5.5)
    assert slave.heartbeats.next_deadline() == 7.0


def test_no_heartbeat_before_the_first_incarnation() -> None:
    """Who has no incarnation proves nothing."""
    slave = RegistrationRig()
    slave.standing = Standing(0, 0, None, (), 0, 0)
    slave.heartbeats.tick(0.0)
    assert slave.heartbeats.tick(2.0) == []
    assert slave.heartbeats.next_deadline() == 4.0


@pytest.mark.parametrize(
    "answer",
    [
        SlaveHeartbeatAnswer(1, 8.0, True, 0, LiveTransfers(1, (), ())),
        SlaveHeartbeatAnswer(2, 8.0, False, 0, LiveTransfers(1, (), ())),
        StaleTerm("you are early"),
    ],
    ids=["register", "a later term", "stale"],
)
def test_a_heartbeat_can_ask_for_a_register(answer: SlaveHeartbeatAnswer | Exception) -> None:
    """A master that does not know us as ready, a new master, and one that calls us stale."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    slave.heartbeat(2.0)
    assert work_of(slave.heartbeats.on_answer(answer, 2.1)) == [DESCRIBE]


def test_an_answer_from_before_a_register_asks_for_no_second_one() -> None:
    """A slave that registers again loses its open round: the heartbeat had been sent under the registration before."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    slave.heartbeat(2.0)
    assert slave.registration.request_again(slave.registration.number, 2.1) == [DESCRIBE]
    late = SlaveHeartbeatAnswer(1, 8.0, True, 0, LiveTransfers(1, (), ()))
    assert work_of(slave.heartbeats.on_answer(late, 2.2)) == []
    slave.answer(Hold(), Followed.SERVES, 2.3)
    slave.heartbeat(4.0)
    slave.registration.request_again(slave.registration.number, 4.1)
    slave.answer(Hold(), Followed.SERVES, 4.2)
    assert work_of(slave.heartbeats.on_answer(late, 4.3)) == []
    slave.heartbeat(6.0)
    assert work_of(slave.heartbeats.on_answer(late, 6.1)) == [DESCRIBE]


def test_the_newest_list_of_what_is_live_heals_once_the_shard_has_a_turn() -> None:
    """While the shard is busy lists replace each other; an old term or incarnation heals nothing."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    lists = [SlaveHeartbeatAnswer(1, 8.0, False, n, LiveTransfers(n, (PushId("x", 1, n),), ())) for n in range(4)]
    slave.heartbeat(2.0)
    assert slave.heartbeats.on_answer(lists[0], 2.1) == [drop_unlisted(lists[0])]
    for n, now in ((1, 4.0), (2, 6.0)):
        slave.heartbeat(now)
        assert slave.heartbeats.on_answer(lists[n], now) == []
    assert slave.heartbeats.on_dropped([]) == [drop_unlisted(lists[2])]
    assert slave.heartbeats.on_dropped([]) == []
    slave.heartbeat(8.0)
    assert slave.heartbeats.on_answer(SlaveHeartbeatAnswer(0, 8.0, False, 9, LiveTransfers(1, (), ())), 8.1) == []
    slave.heartbeat(10.0)
    slave.standing = Standing(8, 1, GENESIS, (), 0, 0, serves=True)
    assert slave.heartbeats.on_answer(lists[3], 10.1) == []


def test_a_slave_where_nothing_is_open_asks_nothing_of_its_shard() -> None:
    """What an order opens meanwhile is compared with the list of the next heartbeat."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    slave.standing = Standing(7, 1, GENESIS, (), 0, 0)
    answer = SlaveHeartbeatAnswer(1, 8.0, False, 1, LiveTransfers(1, (PushId("x", 1, 1),), ()))
    slave.heartbeat(2.0)
    assert slave.heartbeats.on_answer(answer, 2.1) == []
    slave.standing = Standing(7, 1, GENESIS, (), 0, 0, serves=True)
    slave.heartbeat(4.0)
    known = SlaveHeartbeatAnswer(1, 8.0, False, 1, None)
    assert slave.heartbeats.on_answer(known, 4.1) == [drop_unlisted(answer)]


def test_a_silent_master_is_told_to_the_log_once_and_so_is_its_return() -> None:
    """An hour without a master is two lines, not 1,800."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    events = []
    answers: list[SlaveHeartbeatAnswer | Exception] = [
        UnavailableMaster("1"), UnavailableMaster("2"), SlaveHeartbeatAnswer(1, 8.0, False, 0, LiveTransfers(1, (), ()))
    ]  # fmt: skip
    for n, answer in enumerate(answers):
        slave.heartbeat(2.0 * (n + 1))
        actions = slave.heartbeats.on_answer(answer, 2.0 * (n + 1))
        events += [action.event for action in actions if isinstance(action, WriteLog)]
    assert events == ["master_silent", "master_back"]


def test_a_list_that_is_not_sent_again_is_the_one_that_the_slave_has() -> None:
    """Its number goes with every heartbeat; what the slave holds is compared with it each time, as of the newest order.

    An answer that was lost changes nothing: the next heartbeat names the same number.
    """
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    live = LiveTransfers(5, (PushId("x", 1, 1),), ())
    assert slave.heartbeat(2.0).live == 0
    first = SlaveHeartbeatAnswer(1, 8.0, False, 10, live)
    assert slave.heartbeats.on_answer(first, 2.1) == [drop_unlisted(first)]
    slave.heartbeats.on_dropped([])
    assert slave.heartbeat(4.0).live == 5
    same = SlaveHeartbeatAnswer(1, 8.0, False, 20)
    assert slave.heartbeats.on_answer(same, 4.1) == [drop_unlisted(SlaveHeartbeatAnswer(1, 8.0, False, 20, live))]
    slave.heartbeats.on_dropped([])
    assert slave.heartbeat(6.0).live == 5
    slave.heartbeats.on_answer(UnavailableMaster("lost"), 6.1)
    assert slave.heartbeat(8.0).live == 5


def test_a_list_is_good_for_its_term_only() -> None:
    """A later master counts its lists anew: it is told 0, and an answer of it without a list heals nothing."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    slave.heartbeat(2.0)
    slave.heartbeats.on_answer(SlaveHeartbeatAnswer(1, 8.0, False, 10, LiveTransfers(5, (), ())), 2.1)
    slave.heartbeats.on_dropped([])
    slave.standing = Standing(7, 2, GENESIS, (), 0, 0, serves=True)
    assert slave.heartbeat(4.0).live == 0
    assert slave.heartbeats.on_answer(SlaveHeartbeatAnswer(2, 8.0, False, 3), 4.1) == []
    assert slave.heartbeat(6.0).live == 0


def test_a_list_is_good_for_its_registration_only() -> None:
    """A master that was restored from an old copy may begin a term anew; it hears from its slaves first."""
    slave = RegistrationRig().serving()
    slave.heartbeats.tick(0.0)
    slave.heartbeat(2.0)
    slave.heartbeats.on_answer(SlaveHeartbeatAnswer(1, 8.0, False, 10, LiveTransfers(5, (), ())), 2.1)
    slave.heartbeats.on_dropped([])
    slave.registration.request_again(slave.registration.number, 2.2)
    slave.answer(Hold(), Followed.SERVES, 2.3)
    assert slave.heartbeat(4.0).live == 0


@pytest.mark.parametrize(("heartbeat_s", "deadline_s"), [(2.0, 2.0), (0.1, 1.0)])
def test_a_heartbeat_has_until_the_next_one_and_at_least_a_second(heartbeat_s: float, deadline_s: float) -> None:
    """The next tells the same and more; a second is what a call may take on a slow link."""
    slave = RegistrationRig(replace(TIMING, heartbeat_s=heartbeat_s))
    slave.heartbeats.tick(0.0)
    (call,) = slave.heartbeats.tick(heartbeat_s)
    assert call.deadline_s == deadline_s
