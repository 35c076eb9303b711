"""θ and m of every version of a toy run, bit for bit: what a change of kernels, gate, clip or weights would move."""

from __future__ import annotations

import json
from typing import Any

from dips.protocol.effects import Commit
from tests.golden.toy import ToyRun, rounded

FILE = "theta.json"


class _Watched(ToyRun):
    """A toy run that writes down what is served after each flip."""

    def __init__(self) -> None:
        self.served: list[dict[str, Any]] = []
        super().__init__()

    def _answer(self, body: Any) -> Any:
        answer = super()._answer(body)
        if isinstance(body, Commit):
            row, theta = self.committed[-1], self.memory.theta(body.version)
            self.served.append(
                {
                    "version": str(body.version),
                    "folds": [[str(f.push), *map(rounded, (f.weight, f.norm, f.score))] for f in row.folds],
                    "scale": rounded(row.step.scales[0]),
                    "delta_norm": rounded(row.delta_norm),
                    "clipped": row.clipped,
                    "theta": self.digest(theta),
                    "momentum": self.digest(self.memory.momentum(body.version)),
                    "first": [float(x).hex() for x in theta[0][:4]],
                }
            )
        return answer


def make() -> dict[str, bytes]:
    run = _Watched()
    run.play()
    return {FILE: json.dumps(run.served, indent=1).encode() + b"\n"}
