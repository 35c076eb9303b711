"""Where one life ends and another begins: what only a restart, a restore or a disk that comes back can show.

Each is drawn by itself, in its share of the seeds, beside the faults of mixes (mix.py); the two tables switch one off
or play it alone. Each once found its bug on the code before it was mended (docs/track-record.md).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from dips.errors import DipsError
from dips.sim.observer import Observer
from dips.sim.slave import SlaveProcess
from dips.sim.world import World
from dips.wire.generated import slave_pb2
from tests.simulation.strikes import (
    OPERATOR_S,
    Strike,
    ask_operator,
    choose_cluster,
    choose_machine,
    draw_down_s,
    restart_machine,
)


def mirror_down_at_restart(world: World, rng: Random) -> None:
    """A slave starts again while its mirror cannot be listed: what lies there is not nothing."""
    machine = choose_machine(world, rng)
    mirror = machine.mirror
    if mirror is None:
        return
    mirror.gone = True
    restart_machine(world, machine, draw_down_s(rng))

    def mend() -> None:
        mirror.gone = False

    world.call_later(10.0 + 20.0 * rng.random(), "a mirror is there again", mend)


def rotten_mirror(world: World, rng: Random) -> None:
    """A copy in a mirror rots, the original lies whole on its disk; then the slave starts again."""
    machine = choose_machine(world, rng)
    if machine.mirror is not None and machine.process is not None and machine.disk.good_versions:
        machine.mirror.rot_newest()
        restart_machine(world, machine, draw_down_s(rng))


def second_restore(world: World, rng: Random) -> None:
    """The power goes, the ledger is lost, its mirror had lagged, and it is restored twice before anybody looks.

    Every disk holds a version of which the mirror never heard; so the master must refuse however often it is restored.
    """
    copy = world.master.disk.copy_file()
    (known,) = copy.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()

    def restore() -> None:
        newest = [max((v.round for v in m.disk.good_versions), default=0) for m in world.machines.values()]
        if min(newest) <= known or world.master.disk.is_old_copy:
            return  # nobody could tell
        world.crash_master()
        try:
            world.master.disk.restore_lagging(copy, times=2)
        except DipsError:  # the second one is refused: a person must look
            world.monitor.rare_event_occurred("old_ledger")
            return
        for machine in world.machines.values():
            machine.crash()
            machine.start()
        world.call_later(
            1.0 + rng.random(), "the master starts on a ledger that was restored twice", world.start_master
        )

    if world.heap.now + 20.0 < world.scenario.quiet_at:
        world.call_later(5.0 + 8.0 * rng.random(), "a ledger is restored twice", restore)


def leftover_wal(world: World, rng: Random) -> None:
    """The ledger's file is moved away after a crash, its WAL stays there, and the next master restores the file."""
    if world.master.disk.is_old_copy or not world.scenario.mirrors:
        return
    world.crash_master()
    with TemporaryDirectory() as directory:
        world.master.restore_beside_wal(Path(directory))
    world.monitor.rare_event_occurred("ledger_lost")
    world.call_later(draw_down_s(rng), "the master starts beside a WAL", world.start_master)


def swapped_disks(world: World, rng: Random) -> None:
    """Two slaves' disks are attached to each other's machines; both refuse, and a person swaps them back."""
    one, other = rng.sample(list(world.machines.values()), 2)
    if one.disk.swapped_with is not None or other.disk.swapped_with is not None:
        return
    for machine in (one, other):
        restart_machine(world, machine, draw_down_s(rng))
    one.disk.swap_with(other.disk)

    def swap_back() -> None:
        one.disk.swap_back()
        for machine in (one, other):
            machine.start()

    world.call_later(3.0 * OPERATOR_S, "the operator swaps two disks back", swap_back)


def silent_disk(world: World, rng: Random) -> None:
    """Each fsync of a disk takes as long as two orders may, and tells nothing meanwhile."""
    disk = choose_machine(world, rng).disk
    disk.fsync_s = world.options.timing.order_s * (1.0 + 2.0 * rng.random())

    def mend() -> None:
        disk.fsync_s = 0.0

    world.call_later(10.0 + 10.0 * rng.random(), "a disk's fsync returns at once again", mend)


def no_descriptors(world: World, rng: Random) -> None:
    """A slave can open nothing for a while, neither file nor connection; then it starts again, as does a cluster."""
    machine, cluster = choose_machine(world, rng), choose_cluster(world, rng)
    until = 4.0 + 10.0 * rng.random()
    machine.disk.no_files = True
    if rng.random() < 0.5:
        restart_machine(world, machine, draw_down_s(rng))
    cluster.crash()  # what it had connected is gone, and what it connects anew is not accepted
    world.data.part_link(cluster.name, machine.name, world.heap.now + until)
    world.call_later(draw_down_s(rng), f"{cluster.name} starts again", cluster.start)

    def mend() -> None:
        machine.disk.no_files = False

    ask_operator(world)
    world.call_later(until, "descriptors are free again", mend)


class StopAtOpening(Observer):
    """Sends one SIGTERM, which a slave finds beside the order to open a pull."""

    def __init__(self, world: World) -> None:
        self._world, self._sent = world, False

    def order_arrives(self, process: SlaveProcess, request: slave_pb2.Order) -> None:
        if not self._sent and request.HasField("open_pull") and self._world.heap.now < self._world.scenario.quiet_at:
            self._sent = True
            process.terminate()


def stopped_slave(world: World, rng: Random) -> None:
    """A slave is stopped by SIGTERM as it is about to open a pull, and is started again."""
    world.monitor.add_observers([StopAtOpening(world)])


def stopped_master(world: World, rng: Random) -> None:
    """The master is stopped by SIGTERM, twice in a few seconds: it writes what it has decided, and is started again."""
    for at in (0.0, 1.0 + 9.0 * rng.random()):
        world.call_later(at, "SIGTERM of the master", world.terminate_master)


def enrolled_again(world: World, rng: Random) -> None:
    """A cluster's certificate is revoked and another one issued at once, again and again: its agent goes on."""
    name, at = choose_cluster(world, rng).name, 0.0
    for _ in range(4):
        world.call_later(at, f"{name} is revoked", partial(world.authority.revoke, name))
        world.call_later(at + 0.9 * rng.random(), f"{name} is enrolled again", partial(world.authority.enroll, name))
        at += 2.0 + 4.0 * rng.random()


CROSSINGS: dict[str, Strike] = {
    "mirror_down_at_restart": mirror_down_at_restart,
    "rotten_mirror": rotten_mirror,
    "second_restore": second_restore,
    "leftover_wal": leftover_wal,
    "swapped_disks": swapped_disks,
    "silent_disk": silent_disk,
    "no_descriptors": no_descriptors,
    "stopped_slave": stopped_slave,
    "stopped_master": stopped_master,
    "enrolled_again": enrolled_again,
}
SHORT_LINEAGE = "short_lineage"  # strikes nowhere: the master remembers three versions (mix.py)
FEW_RANGES = "few_ranges"  # likewise: each cluster may hold three data ranges, and pushes before it gets more
# Of all seeds, how many meet each; a line that is taken out switches it off.
DRAWN: dict[str, float] = {
    SHORT_LINEAGE: 0.15,
    FEW_RANGES: 0.15,
    "mirror_down_at_restart": 0.15,
    "rotten_mirror": 0.10,
    "second_restore": 0.15,
    "leftover_wal": 0.05,
    "swapped_disks": 0.10,
    "silent_disk": 0.15,
    "no_descriptors": 0.15,
    "stopped_slave": 0.15,
    "stopped_master": 0.15,
    "enrolled_again": 0.15,
}
