"""Rules of the master, broken from outside: each function returns what stands where (sabotage.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from dips.ids import PushId, VersionId
from dips.master.core import MasterCore
from dips.master.ledger import Ledger
from dips.master.runtime import MasterOutside, Runtime, SlaveLink
from dips.protocol import durability, push_pull, rollback, run_state, slaves
from dips.protocol import round as round_module
from dips.protocol.admission import SlotAnswer, SlotAsk, SlotQueue
from dips.protocol.data import Intervals
from dips.protocol.effects import Outcome, Result
from dips.protocol.entities import Cluster, Fanout, Pull, Round
from dips.protocol.enums import FanoutKind, OutcomeKind
from dips.protocol.events import OrderAnswered, OrderFailed, SlaveRegistered
from dips.protocol.records import LedgerState, Record, VersionRow
from dips.protocol.run_state import RunState
from dips.protocol.transfer_book import TransferBook

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


def announce_before_record() -> list[Patch]:
    async def write(self: MasterOutside, records: Sequence[Record]) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, self._ledger.write_records, records)  # unwaited

    return [(MasterOutside, "write_records", write)]


def record_before_all_persisted() -> list[Patch]:
    honest = slaves.take_answer

    def take_answer(run: RunState, event: OrderAnswered) -> Fanout | None:
        found = run.orders.find_order(event.number)
        fanout = honest(run, event)
        if fanout is None and found is not None and found[0].kind is FanoutKind.PERSIST and found[0].answers:
            run.forget_orders(frozenset({FanoutKind.PERSIST}))
            return found[0]
        return fanout

    return [(slaves, "take_answer", take_answer)]


def reuse_round_after_restart() -> list[Patch]:
    honest = Ledger.read_state

    def start_term(self: Ledger, above: int = 0) -> int:
        return 1

    def state(self: Ledger) -> LedgerState:
        found = honest(self)
        return replace(found, term=1, next_round=found.versions[-1].version.round + 1)

    return [(Ledger, "start_term", start_term), (Ledger, "read_state", state)]


def row_of_what_is_tuned() -> list[Patch]:
    honest = round_module.commit_version

    def commit_version(run: RunState, r: Round, digests: tuple[tuple[str, str], ...], *, durable: bool) -> None:
        round_module.make_step(run, r)  # by what holds now
        honest(run, r, digests, durable=durable)

    return [(round_module, "commit_version", commit_version)]


def forget_quarantine() -> list[Patch]:
    honest = Ledger.read_state

    def state(self: Ledger) -> LedgerState:
        return replace(honest(self), quarantined=())

    return [(Ledger, "read_state", state)]


def stats_of_skipped_rounds() -> list[Patch]:
    honest = round_module.skip_round

    def skip_round(run: RunState, reason: str) -> None:
        if run.round is not None:
            run.penalty.keep_statistics(*round_module.statistics_after(run, run.round))
        honest(run, reason)

    return [(round_module, "skip_round", skip_round)]


def blind_leases() -> list[Patch]:
    def wake(self: MasterCore, now: float) -> None:
        """No gap is seen."""

    return [(MasterCore, "on_wake", wake)]


def tell_gated_as_accepted() -> list[Patch]:
    honest = push_pull._answer_awaited

    def answer_awaited(run: RunState, cluster: Cluster, push: PushId) -> Result:
        found = honest(run, cluster, push)
        gated = isinstance(found, Outcome) and found.kind is OutcomeKind.GATED
        return replace(found, kind=OutcomeKind.ACCEPTED) if gated else found

    return [(push_pull, "_answer_awaited", answer_awaited)]


def believe_fresh_slaves() -> list[Patch]:
    honest_offered = rollback.offered_versions

    def offered(event: SlaveRegistered) -> frozenset[VersionId]:
        """A process that has just started offers nothing, whatever lies on its disk."""
        return honest_offered(event) if event.memory is not None else frozenset()

    def offers(_: Iterable[VersionRow]) -> bool:
        """Whatever became of the versions after it; `lineage` keeps their tokens and ranges by the same rule."""
        return True

    places = (run_state, rollback)
    return [(rollback, "offered_versions", offered), *((place, "offers_genesis", offers) for place in places)]


def lease_twice() -> list[Patch]:
    honest = Intervals.take_smallest

    def take(self: Intervals) -> int:
        taken = honest(self)
        if taken % 16 == 15:
            self.add_number(taken)
        return taken

    return [(Intervals, "take_smallest", take)]


def tell_old_lists() -> list[Patch]:
    honest = TransferBook.close_pull

    def close(self: TransferBook, pull: Pull) -> None:
        honest(self, pull)
        self.number -= 1

    return [(TransferBook, "close_pull", close)]


def drop_queue() -> list[Patch]:
    def request_slot(
        self: SlotQueue, ask: SlotAsk, free: int, retry_s: float, most_kept_s: float, now: float
    ) -> SlotAnswer:
        return SlotAnswer(free > 0, 0, 1)

    return [(SlotQueue, "request_slot", request_slot)]


def forget_mirrors() -> list[Patch]:
    def mirrored_versions(run: RunState) -> tuple[VersionId, ...]:
        return ()

    return [(durability, "mirrored_versions", mirrored_versions)]


def reuse_incarnations() -> list[Patch]:
    def next_incarnation(self: RunState, present: int) -> int:
        return present + 1

    return [(RunState, "next_incarnation", next_incarnation)]


def orders_in_turn() -> list[Patch]:
    honest = SlaveLink._send_once
    turns: WeakKeyDictionary[SlaveLink, asyncio.Lock] = WeakKeyDictionary()

    async def send_once(self: SlaveLink, *sent: Any) -> OrderAnswered | OrderFailed | None:
        async with turns.setdefault(self, asyncio.Lock()):  # gRPC tells of an arrival with the answer only
            return await honest(self, *sent)

    return [(SlaveLink, "_send_once", send_once)]


def drop_what_is_decided() -> list[Patch]:
    async def flush(self: Runtime) -> None:
        """Nothing is waited for."""

    return [(Runtime, "_flush_records", flush)]
