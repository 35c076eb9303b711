"""Mutants of agent and ranks (dips/client)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AGENT, RANK, ROOM = "dips/client/agent", "dips/client/rank", "dips/client"
TESTS = "tests/unit/client"

MUTANTS = (
)
