"""Tokens of inner steps: counted for the whole cluster, or by each rank for itself and summed over the ranks.

A script passes one of two numbers to every step, the same kind on all ranks: `tokens`, of which rank 0's counts for the
cluster, or `local_tokens`, of this rank's own part of the batch. Counts of other ranks, and counts that an accelerator
still computes, are unknown when a step is reported: they are summed locally and reported at the next poll.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, SupportsInt

from dips.client.ipc.messages import TokensCounted
from dips.client.parallel.devices import is_deferred
from dips.client.rank.agent_client import AgentClient
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.outer_state import OuterState
from dips.errors import LocalProtocolError

ONE_OF_THEM = (
    "OuterLoop.step: expected tokens or local_tokens, and the same of them in every step on all ranks: local_tokens of "
    "this rank's own part of the batch (0 where another rank computes the same part), or tokens of all ranks together"
)
PER_RANK = (
    "OuterLoop.step: the ranks passed {tokens} tokens, and rank 0's number counts for the whole cluster: pass "
    "local_tokens instead, or the tokens of all ranks together, the same number on each"
)


class StepTokens:
    """One rank's count of tokens."""

    def __init__(self, state: OuterState, collectives: JobCollectives, agent_client: AgentClient) -> None:
        self._state, self._collectives, self._agent_client = state, collectives, agent_client
        self._local: bool | None = None  # whether the script passes local_tokens; None before the first step
        self._compared = False
        self._passed = self._known = (
            0  # tokens since the last `settle_tokens`: passed on the host, returned to the caller
        )
        self._late: Any = None  # sum of tokens passed on an accelerator; None: none

    def count_step(self, tokens: SupportsInt | None, local_tokens: SupportsInt | None) -> int:
        """Count one step; return the tokens known at once, which are reported with the step."""
        local = tokens is None
        if local == (local_tokens is None) or self._local not in (None, local):
            raise LocalProtocolError(ONE_OF_THEM)
        self._local = local
        given: Any = local_tokens if local else tokens
        if is_deferred(given):  # reading it would wait for the accelerator
            late = given.detach().reshape(())
            self._late = late.clone() if self._late is None else self._late + late
            return 0
        number = read_count("local_tokens" if local else "tokens", given)
        self._passed += number
        self._known += number
        return number

    def settle_tokens(self) -> int:
        """Report the tokens that no step could report; return their number for the cluster. Collective.

        Raises LocalProtocolError, the same on all ranks, if the ranks do not pass the same kind of number.
        """
        if self._local is None:
            return 0
        if self._late is not None:
            self._passed, self._late = self._passed + read_count("tokens", self._late.item()), None
        if not self._compared:
            self._compare_ranks()
            self._compared = True
        (counted,) = self._collectives.all_sum([self._passed]) if self._local else [self._passed]
        rest = counted - self._known
        self._passed = self._known = 0
        if rest:
            self._agent_client.notify_agent(TokensCounted(self._state.attempt, rest))  # rank 0 sends
        return rest

    def _compare_ranks(self) -> None:
        """Compare the numbers passed by the ranks, once. A rank that passes 0 tokens leaves the count to rank 0."""
        own = json.dumps([self._local, self._passed]).encode()
        by_rank = [json.loads(told) for told in self._collectives.all_gather(own)]
        if len({local for local, _ in by_rank}) > 1:
            raise LocalProtocolError(ONE_OF_THEM)
        tokens = [passed for _, passed in by_rank]
        if not self._local and self._collectives.rank == 0 and len({told for told in tokens if told}) > 1:
            shown = ", ".join(str(told) for told in tokens[:4]) + (" …" if len(tokens) > 4 else "")
            warnings.warn(PER_RANK.format(tokens=shown), stacklevel=5)


def read_count(name: str, given: Any) -> int:
    """Return a number of tokens as an int: of Python, numpy or torch, also a whole float."""
    try:
        number = int(given)
        whole = bool(number == given) and number >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):
        whole = False
    if not whole:
        raise LocalProtocolError(f"OuterLoop.step: {name}: expected a whole number, 0 or more, got {given!r}")
    return number
