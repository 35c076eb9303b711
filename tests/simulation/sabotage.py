"""Sabotages: each breaks one rule from outside, to show that the invariants bite.

Production code has no switch for any of this: a sabotage wraps a function for as long as its context is open. Each must
be found within 200 seeds by one of the invariants named beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from dips.errors import ConfigError
from dips.sim.scenario import Scenario
from tests.simulation import broken_cluster as cluster
from tests.simulation import broken_master as master
from tests.simulation import broken_slave as slave
from tests.simulation.drawn import crowd_of, plain_of, scenario_of
from tests.simulation.mix import LEAVING, Mix, crossed, former

Patch = tuple[Any, str, Any]  # (owner, name, what stands there instead)


@dataclass(frozen=True)
class Sabotage:
    """`rule` is what is broken, `found_by` the invariants that must find it, `found_at` a seed of `scenario` that does.

    The seed spares the search; when runs have changed so that it finds nothing, the tests name another.
    """

    rule: str
    found_by: tuple[int, ...]
    found_at: int
    patches: Callable[[], list[Patch]]
    scenario: Callable[[int], Scenario] = scenario_of  # of a seed
    mix: Callable[[int], Mix] = former  # what a seed meets
    game: str = ""  # of __main__.GAMES, if not the usual one


SABOTAGES: dict[str, Sabotage] = {
    "announce-before-record": Sabotage(
        "effects wait for the record before them", (2,), 0, master.announce_before_record
    ),
    "record-before-all-persisted": Sabotage(
        "the row waits for every slave's disk", (3,), 6, master.record_before_all_persisted
    ),
    "flip-on-prepared": Sabotage("a slave serves a version after its Commit only", (2,), 21, slave.flip_on_prepared),
    "refold-on-retry": Sabotage(
        "a repeated order repeats its answer, not its work", (1, 4, 8), 0, slave.refold_on_retry
    ),
    "reuse-round-after-restart": Sabotage(
        "terms and rounds come from the ledger", (1, 5), 1, master.reuse_round_after_restart
    ),
    "unpin-at-send": Sabotage("a pin ends when its last byte is gone", (1, 11), 0, slave.unpin_at_send),
    "free-at-move": Sabotage("a bank is free when nothing of it is in flight", (1, 11), 86, slave.free_at_move),
    "keep-local": Sabotage("the master names what is deleted", (3,), 0, slave.keep_local),
    "stats-of-skipped-rounds": Sabotage(
        "statistics move with a committed version", (8,), 0, master.stats_of_skipped_rounds
    ),
    "accept-old-stream": Sabotage("a chunk of a closed stream changes nothing", (1, 5), 0, slave.accept_old_stream),
    "install-alone": Sabotage("all ranks install, or none", (6,), 6, cluster.install_alone),
    "blind-leases": Sabotage("silence counts while somebody listens", (12,), 7, master.blind_leases),
    "tokens-cut-at-pull": Sabotage(
        "progress is cut at the freeze, not at the pull", (9,), 0, cluster.tokens_cut_at_pull
    ),
    "lose-what-was-settled": Sabotage(
        # 12: a push of tokens that no heartbeat told of is held back for ever
        "what was settled since a heartbeat is not lost",
        (9, 12),
        11,
        cluster.lose_what_was_settled,
    ),
    "offers-without-ledger": Sabotage("only a row makes a snapshot a version", (2, 4), 6, slave.offers_without_ledger),
    "tell-gated-as-accepted": Sabotage(
        "the outcome of a push is what the ledger has", (4,), 0, master.tell_gated_as_accepted
    ),
    "believe-fresh-slaves": Sabotage(
        "a run does not begin anew for an empty slave", (7,), 11, master.believe_fresh_slaves
    ),
    "forget-mirrors": Sabotage(
        "what a mirror holds as its newest stays on every disk", (3, 12), 3, master.forget_mirrors
    ),
    "reuse-incarnations-after-restore": Sabotage(
        "a restored ledger gives no incarnation that may have been given", (5,), 8, master.reuse_incarnations
    ),
    "lease-twice": Sabotage("a data range is leased to one incarnation at a time", (10,), 0, master.lease_twice),
    "forget-a-range": Sabotage("a push names every data range that it used up", (10,), 11, cluster.forget_a_range),
    "drop-queue": Sabotage(
        "a slot goes to who asked first, not to who asks now", (12,), 7, master.drop_queue, crowd_of
    ),
    "update-from-anywhere": Sabotage(
        "updates are for ranks that hold where they begin", (1,), 14, slave.update_from_anywhere
    ),
    "tell-old-lists": Sabotage("a list of what is live has a number of its own", (12,), 3, master.tell_old_lists),
    "row-of-what-is-tuned": Sabotage(
        "a version's row has the numbers of its Apply", (1,), 6, master.row_of_what_is_tuned, plain_of
    ),
    "forget-quarantine": Sabotage("a new master knows whom an operator keeps out", (2,), 17, master.forget_quarantine),
    "lose-a-cancellation": Sabotage(
        "an agent ends at SIGTERM, whatever arrives with it",
        (12,),
        11,
        cluster.lose_a_cancellation,
        mix=lambda seed: LEAVING,
    ),
    "orders-in-turn": Sabotage(
        "no order waits for the answer of another", (12,), 4, master.orders_in_turn, game="long"
    ),
    "close-pulls-once": Sabotage(
        "a slave that ends closes what is opened meanwhile",
        (12,),
        9,
        slave.close_pulls_once,
        mix=lambda seed: crossed("stopped_slave"),
    ),
    "end-at-a-refusal": Sabotage(
        "who is revoked and enrolled again within a moment goes on",
        (2,),
        6,
        cluster.end_at_a_refusal,
        mix=lambda seed: crossed("enrolled_again"),
    ),
    "drop-what-is-decided": Sabotage(
        "a master that is stopped writes what it has decided",
        (2,),
        49,
        master.drop_what_is_decided,
        mix=lambda seed: crossed("stopped_master"),
    ),
    "leak-slot": Sabotage("what was dropped is never opened again", (11, 12), 3, slave.leak_slot),
}


@contextmanager
def sabotaged(name: str | None) -> Iterator[None]:
    """Break the named rule for as long as the context is open; None breaks nothing."""
    if name is not None and name not in SABOTAGES:
        raise ConfigError(f"no sabotage {name!r}; there are {', '.join(SABOTAGES)}")
    with ExitStack() as stack:
        for owner, attribute, instead in SABOTAGES[name].patches() if name else []:
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, instead)
        yield
