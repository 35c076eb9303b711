"""The order of asking: in one turn no two workers of a transfer meet at a slave (§3.1, Figure 5).

Rows of a rotation: worker w begins at slave w mod S and walks on by one each turn. With no more workers than slaves no
two ever meet; with more, each slave is visited by at most ⌈W/S⌉ at once. An order of asking, never a barrier: who is
late is overtaken.
"""

from __future__ import annotations


def slaves_for_worker(worker: int, slaves: int) -> tuple[int, ...]:
    """The slaves in the order in which `worker` turns to them."""
    return tuple((worker + turn) % slaves for turn in range(slaves))


def workers_for_slave(slave: int, workers: int, slaves: int) -> tuple[int, ...]:
    """The workers in the order in which `slave` asks them: the transpose of `slaves_for_worker`."""
    return tuple(sorted(range(workers), key=lambda w: ((slave - w) % slaves, w)))
