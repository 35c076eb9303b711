"""The gates: pure functions of a push's evidence and the statistics, by the names that `penalty.gates` lists.

A gate returns an Opinion with its sentence. The first GATED decides; flags are reported. The memory of a gate between
rounds is in PenaltyRow or ScoreHistory and is updated by penalty.py when a round is settled.
"""

from __future__ import annotations

from collections.abc import Callable

from dips.protocol import plugins
from dips.protocol.enums import GateName
from dips.protocol.gates.direction import judge_direction
from dips.protocol.gates.losses import judge_loss
from dips.protocol.gates.norms import Past, judge_layers, judge_norm, judge_norm_literally
from dips.protocol.gates.replays import judge_replay
from dips.protocol.verdicts import Opinion, PushEvidence

Gate = Callable[[PushEvidence, Past], Opinion]

GATES: dict[GateName, Gate] = {
    GateName.DIPS: judge_norm,
    GateName.DIPS_PAPER: judge_norm_literally,
    GateName.EDIT: judge_layers,
    GateName.DIRECTION: judge_direction,
    GateName.LOSS: judge_loss,
    GateName.REPLAY: judge_replay,
}
OF_NORMS = frozenset({GateName.DIPS, GateName.DIPS_PAPER, GateName.EDIT})  # may end in a new warm-up


def find_gate(name: GateName | str) -> Gate:
    """Return a built-in gate, or the one that a user's entry point of the group `dips.gates` names."""
    return GATES[name] if isinstance(name, GateName) else plugins.load_plugin(plugins.GATES, name)
