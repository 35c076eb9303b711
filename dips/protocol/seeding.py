"""Seeding: θ of a model over the lanes, from an operator's host to the slaves: the first model to those that lack v0@r0
(`dips seed`, docs/guides/seed.md), or a saved one to all, when one of them has lost the head and no version that all
have is near enough (`dips recover`).

    asked → OpenPush on each slave that takes it → granted → staged → KeepSeed: compared with the digests, on its disk

All slaves must be present before anything moves. A slave keeps only a first model with the digests of the ledger, so
seeding does not define θ (docs/architecture.md#invariant-7), and a slave that has it is skipped when the operator asks
again. The ledger has no row of it: after a restart the master does not know the transfer, its slaves drop it for the
next one, and what is on their disks stays. The transfer ends when it has not been asked for during a lease, or a slave
that takes it is lost.

A recovery makes a version: the successor of the head, of a round that is reserved first, with θ of the file and m of
each slave's newest snapshot. When it is on all disks, its row makes it the head, and the slaves load it. Before the row
nothing has changed: what some slaves have written is of a round without a version, which they are told to delete.
Another try reserves another round, since two contents must not have one name.
"""

from __future__ import annotations

from dips.dataclass import replace
from dips.errors import ConfigError, RemoteProtocolError
from dips.ids import GENESIS, PushId, VersionId
from dips.outer_step import NO_STEP
from dips.printable import join_some
from dips.protocol import effects, rollback
from dips.protocol.entities import Bodies, Fanout, Recovery, Seed
from dips.protocol.enums import SEED_ORDERS, FanoutKind, RoundResult, SlaveState
from dips.protocol.events import ModelKept, PushRefused, PushStaged, RecoverAsked, SeedAsked
from dips.protocol.manifest import Manifest
from dips.protocol.rank_keys import find_wrong_keys
from dips.protocol.records import (
    Record,
    RoundReserved,
    ScoreHistory,
    VersionCommitted,
    VersionRecovered,
    VersionRow,
)
from dips.protocol.round import finish_if_due
from dips.protocol.run_state import RunState

WAITS = "waits for the first model: run `dips seed`"
SEEDER = "dips.seed"  # the cluster in the names of its pushes; their incarnation is the master's term
SEED_RANKS = 1
RECOVERS_IN = 2  # protocol: the release before knows neither the question nor a KeepSeed of another version
AWAY = (SlaveState.AWAITED, SlaveState.LOST)


def answer_asked(run: RunState, event: SeedAsked) -> effects.Result:
    """Legal while the head is v0@r0. A repetition renews the lease, and is answered with the progress."""
    if problem := describe_other_model(run.manifest, run.row.genesis, event.genesis):
        raise ConfigError(problem)
    if run.head != GENESIS:
        return effects.Refused(0.0, f"the head is {run.head}: this run has begun, and takes no first model any more")
    return _advance_seed(run, event)


def answer_recovery(run: RunState, event: RecoverAsked) -> effects.Result:
    """Legal while a slave lacks the head. A repetition renews the lease, and is answered with the progress."""
    if len(event.digests) != len(run.manifest.layers):
        raise ConfigError(f"expected a model of {len(run.manifest.layers)} layers, got {len(event.digests)}")
    if run.protocol < RECOVERS_IN:
        why = f"a model is recovered over the lanes from protocol {RECOVERS_IN} on, this run speaks {run.protocol}"
        return effects.Refused(0.0, f"{why}: run `dips finalise` before")
    if event.version is not None and run.has_row(event.version):
        return effects.Acknowledged()
    if run.round is not None:
        return effects.Pending(f"waits for round {run.round.number}")
    return _advance_seed(run, event)


def _advance_seed(run: RunState, event: SeedAsked | RecoverAsked) -> effects.Result:
    if run.seed is not None and event.given_up == run.seed.push.seq and event.seeder == run.seed.seeder:
        drop_seed(run, "it broke at the operator's end")
        run.failed_seed = None  # the caller knows the reason
    if run.seed is not None:
        return _answer_seeder(run, run.seed, event)
    if run.failed_seed is not None and run.failed_seed[0] == event.seeder:
        reason, run.failed_seed = run.failed_seed[1], None
        return effects.Dropped(reason)
    if away := [s.name for s in run.slaves.values() if s.state in AWAY]:
        return effects.Pending(f"not here: {join_some(away)}")
    recovers = isinstance(event, RecoverAsked)
    if recovers and not run.roster.lacking:
        why = "one that began with an empty disk just now is known to lack it when it has registered"
        return effects.Refused(0.0, f"every slave has {run.head}: nothing is lost; {why}")
    takers = {s.name: s.sinc for s in run.slaves.values() if recovers or s.unseeded}
    if not takers:
        return effects.Acknowledged()
    if wrong := find_wrong_keys(event.keys, SEED_RANKS, run.has_encrypted_lanes()):
        return effects.Failed(RemoteProtocolError, wrong)
    _open_seed(run, event, takers)
    return effects.Pending("the slaves are making room for it")


def describe_other_model(manifest: Manifest, ours: tuple[str, ...], theirs: tuple[str, ...]) -> str:
    """Describe how a model differs from the one whose digests are in the ledger; empty if it is that one."""
    if ours == theirs:
        return ""
    if len(ours) != len(theirs):
        return f"expected the model of this run with {len(ours)} layers, got one with {len(theirs)}"
    wrong = [layer.name for layer, a, b in zip(manifest.layers, ours, theirs, strict=True) if a != b]
    return f"expected the first model of this run, got another: they differ in {join_some(wrong)}"


def _answer_seeder(run: RunState, seed: Seed, event: SeedAsked | RecoverAsked) -> effects.Result:
    if seed.seeder != event.seeder:
        return effects.Pending("another process brings a model; its place is free when it has been silent for a lease")
    seed.deadline = run.now + run.options.timing.lease_s
    if not seed.opened:
        return effects.Pending("the slaves are making room for it")
    if not seed.unstaged:
        return effects.Pending(f"being written to the disk: {join_some(tuple(seed.slaves))}")
    version = GENESIS if seed.recovery is None else seed.recovery.version
    grant = run.make_grant(version, run.options.timing.lease_s)
    takers = tuple(address for address in grant.slaves if address.name in seed.slaves)
    return effects.SeedGranted(seed.push, replace(grant, slaves=takers))


def _open_seed(run: RunState, event: SeedAsked | RecoverAsked, takers: dict[str, int]) -> None:
    run.seeds += 1
    push, timing = PushId(SEEDER, run.term, run.seeds), run.options.timing
    seed = Seed(push, event.seeder, run.now + timing.lease_s, takers, unstaged=dict.fromkeys(takers))
    _set_seed(run, seed)
    if isinstance(event, RecoverAsked):
        version = VersionId(run.head.version + 1, run.next_round)
        run.next_round += 1
        run.emit_record(RoundReserved(version.round, run.now))
        seed.recovery = Recovery(version, run.head, event.source, event.digests)
    order = effects.OpenPush(push, SEED_RANKS, timing.lease_s, keys=event.keys, seed=True)
    run.fan_out(FanoutKind.OPEN_SEED, push, dict.fromkeys(takers, order), timing.order_s)
    run.emit_note("seed_opened", push=push, slaves=",".join(takers))


def _set_seed(run: RunState, seed: Seed | None) -> None:
    """Set the transfer, which is in the list of live ones: a slave that serves meanwhile drops what is not there."""
    run.seed = seed
    run.transfers.number += 1


def on_seed_opened(run: RunState, fanout: Fanout) -> None:
    """Open the transfer: every slave that lacks the model has a slot for it."""
    assert run.seed is not None and run.seed.push == fanout.subject
    run.seed.opened = True


def take_staged(run: RunState, event: PushStaged) -> bool:
    """Order a slave that has all of the model to keep it; idempotent. Return False for other pushes.

    What a slave reports before the seeder is granted the transfer is passed over: it cannot have the model.
    """
    if event.push.cluster != SEEDER:
        return False
    seed = run.seed
    if seed is None or seed.push != event.push or seed.slaves.get(event.slave) != event.sinc:
        return True
    if seed.opened and event.slave in seed.unstaged:
        del seed.unstaged[event.slave]
        body: Bodies = {event.slave: _keep_order(run, seed, event.slave)}
        run.fan_out(FanoutKind.KEEP_SEED, seed.push, body, run.options.timing.compute_s)
    return True


def _keep_order(run: RunState, seed: Seed, slave: str) -> effects.KeepSeed:
    recovery = seed.recovery
    if recovery is None:
        return effects.KeepSeed(seed.push)
    digests = tuple(recovery.digests[layer] for layer in run.slaves[slave].layers)
    return effects.KeepSeed(seed.push, recovery.version, digests)


def take_refused(run: RunState, event: PushRefused) -> bool:
    """Drop the transfer if a slave gave it up: its ranges were wrong or it stalled. Return False for other pushes."""
    if event.push.cluster != SEEDER:
        return False
    seed = run.seed
    if seed is not None and seed.push == event.push and seed.slaves.get(event.slave) == event.sinc:
        drop_seed(run, f"{event.slave}: {event.reason}")
    return True


def on_seed_kept(run: RunState, fanout: Fanout) -> None:
    """Record that the model is on the disks of these slaves. The first model is loaded by their next Register; a saved
    one when it is on all disks, and has its row.
    """
    seed = run.seed
    assert seed is not None and seed.push == fanout.subject
    for name, answer in fanout.answers.items():
        del seed.slaves[name]
        _free_slots(run, seed, [name], "it is on the disk")
        run.emit_note("seed_kept", push=seed.push, slave=name)
        if seed.recovery is None:
            run.slaves[name].unseeded = False
        else:
            assert isinstance(answer, ModelKept), f"{name} answered {answer} to a KeepSeed of {seed.recovery.version}"
            seed.recovery.kept[name] = answer.digest
            if answer.momentum_of is None:
                seed.recovery.without[name] = None
    if not seed.slaves:
        _set_seed(run, None)
        if seed.recovery is not None:
            _commit_recovery(run, seed.recovery)


def _commit_recovery(run: RunState, recovery: Recovery) -> None:
    """Write the row, which makes the version exist; the slaves load it when they have registered again."""
    version = recovery.version
    lost = [run.manifest.layers[layer].name for name in recovery.without for layer in run.slaves[name].layers]
    records = records_of_model(
        version, recovery.parent, run.penalty.history, recovery.source, tuple(lost), tuple(recovery.kept.items()),
        run.now,
    )  # fmt: skip
    for record in records:
        run.emit_record(record)
    run.versions[version] = VersionRow(version, recovery.parent, True, 0, False)
    run.committed_at[version] = run.now
    run.counts[RoundResult.APPLIED] += 1  # as by the next master, which reads the row
    for slave in run.slaves.values():
        if slave.offer is not None:
            slave.offer |= {version}
    run.rollback_asked, run.rollback_waits, run.rollback_steps = None, "", 0
    run.emit_note("recovered", version=version, source=recovery.source, without=",".join(lost))
    rollback.move_head(run, version, f"{version} was recovered from {recovery.source}")
    finish_if_due(run)


def records_of_model(
    version: VersionId, parent: VersionId, history: ScoreHistory, source: str, lost: tuple[str, ...],
    digests: tuple[tuple[str, str], ...], at: float,
) -> list[Record]:  # fmt: skip
    """Return the records of a version that an operator made from a file, with a reserved round.

    lost     layers without momentum
    digests  (slave, digest of the manifest of its snapshot)
    """
    row = VersionCommitted(version, parent, True, (), (), NO_STEP, 0.0, False, digests, (), history, at)
    return [row, VersionRecovered(version, source, lost)]


def settle_seed(run: RunState) -> None:
    """Drop, after every event, a transfer that is not asked for any more, one of whose slaves is another process, or a
    recovery of what has come back.
    """
    seed = run.seed
    assert seed is not None
    for name, sinc in seed.slaves.items():
        slave = run.slaves[name]
        if slave.sinc != sinc or slave.state in AWAY:
            drop_seed(run, f"{name} was lost: {slave.reason}")
            return
    if seed.recovery is not None and run.head != seed.recovery.parent:
        drop_seed(run, f"the head is {run.head} now")
    elif seed.recovery is not None and not (run.roster.lacking or run.roster.unasked):
        drop_seed(run, f"every slave has {run.head} again: nothing is lost")
    elif run.now >= seed.deadline:
        drop_seed(run, "nobody asked for it for a lease")


def drop_seed(run: RunState, reason: str) -> None:
    """Drop the transfer on every slave that has not kept the model; the operator asks again."""
    seed = run.seed
    if seed is None:
        return
    _set_seed(run, None)
    run.failed_seed = (seed.seeder, reason)
    run.forget_orders(SEED_ORDERS, seed.push)
    present = [n for n, sinc in seed.slaves.items() if run.slaves[n].sinc == sinc and run.slaves[n].state not in AWAY]
    _free_slots(run, seed, present, reason)
    if seed.recovery is not None:  # each try has another name: what is written of this one would fill their disks
        told = [s.name for s in run.slaves.values() if s.name not in seed.unstaged and s.state not in AWAY]
        order = effects.Retire((seed.recovery.version,))
        run.fan_out(FanoutKind.STANDALONE, seed.push, dict.fromkeys(told, order), run.options.timing.compute_s)
    run.emit_note("seed_dropped", push=seed.push, reason=reason)


def _free_slots(run: RunState, seed: Seed, names: list[str], reason: str) -> None:
    order = effects.DropPush(seed.push, reason)
    run.fan_out(FanoutKind.STANDALONE, seed.push, dict.fromkeys(names, order), run.options.timing.order_s)


def explain_unseeded(run: RunState) -> str:
    """Return what a run without its first model waits for; empty if it has the model, or no longer needs it."""
    if run.head != GENESIS or not any(s.unseeded for s in run.slaves.values()):
        return ""
    if run.seed is None:
        return WAITS
    return f"the first model is on its way to {join_some(tuple(run.seed.slaves))}"
