"""What can go wrong: one function a fault, each given the world and the generator of its own kind.

Every role is crashed and stopped, every link delays, loses, clogs and parts, every disk is slow, full, torn, rotten or
put back from a copy. What lasts a while mends itself; faults.py says when each strikes, and mends all at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

from dips.sim.agent import SimCluster
from dips.sim.world import SlaveMachine, World

Strike = Callable[[World, Random], None]
Death = Callable[[World, Random], list[str]]  # returns the clusters for which nobody waits any more
FOR_EVER = 1e9
OPERATOR_S = 4.0  # until a person has done what the run asks for
DOWN_S = 3.0  # a process that crashed is started again after at most so long; one in five stays away thrice as long


def draw_down_s(rng: Random) -> float:
    return DOWN_S * (0.4 + 0.6 * rng.random()) * (3.0 if rng.random() < 0.2 else 1.0)


def choose_cluster(world: World, rng: Random) -> SimCluster:
    return rng.choice(list(world.clusters.values()))


def choose_machine(world: World, rng: Random) -> SlaveMachine:
    return rng.choice(list(world.machines.values()))


def _lease(world: World) -> float:
    return world.options.timing.lease_s


# ---- clusters ------------------------------------------------------------------------------------------------------


def crash_agent(world: World, rng: Random) -> None:
    """Agent and trainer die, and are started again."""
    cluster = choose_cluster(world, rng)
    cluster.crash()
    world.call_later(draw_down_s(rng), f"{cluster.name} starts again", cluster.start)


def leave(world: World, rng: Random) -> None:
    """SIGTERM of an agent; it joins again later."""
    cluster = choose_cluster(world, rng)
    cluster.leave_run()
    world.call_later(draw_down_s(rng), f"{cluster.name} starts again", cluster.start)


def crash_trainer(world: World, rng: Random) -> None:
    choose_cluster(world, rng).crash_trainer()


def crash_rank(world: World, rng: Random) -> None:
    choose_cluster(world, rng).crash_rank(rng.randrange(3), 0.2 + 1.5 * rng.random())


def hang(world: World, rng: Random) -> None:
    """A trainer stands still, sometimes for longer than the master has patience with it."""
    choose_cluster(world, rng).hang_trainer(world.options.timing.hang_s * (0.3 + rng.random()))


def zombie_agent(world: World, rng: Random) -> None:
    """A cluster's machines are stopped and taken for dead; they wake while their successor is at work."""
    cluster = choose_cluster(world, rng)
    zombie = cluster.abandon_agent()
    world.call_later(0.5 + _lease(world) * rng.random(), f"{cluster.name} starts again", cluster.start)
    if zombie is not None:
        asleep_s = _lease(world) * (0.4 + 1.6 * rng.random())
        world.call_later(asleep_s, f"an old agent of {cluster.name} wakes", zombie.gate.open)


def pause_agent(world: World, rng: Random) -> None:
    """SIGSTOP of a cluster's machines; nobody takes their place."""
    agent = choose_cluster(world, rng).agent
    if agent is not None:
        agent.gate.close()
        world.call_later(_lease(world) * (0.2 + 1.4 * rng.random()), f"{agent.name} goes on", agent.gate.open)


def diverge(world: World, rng: Random) -> None:
    """The next pushes of a cluster are bad."""
    choose_cluster(world, rng).site.diverged += rng.randint(1, 2)


# ---- slaves --------------------------------------------------------------------------------------------------------


def crash_slave(world: World, rng: Random) -> None:
    restart_machine(world, choose_machine(world, rng), draw_down_s(rng))


def restart_machine(world: World, machine: SlaveMachine, down_s: float) -> None:
    machine.crash()
    world.call_later(down_s, f"{machine.name} starts again", machine.start)


def pause_slave(world: World, rng: Random) -> None:
    process = choose_machine(world, rng).process
    if process is not None:
        process.loop.stop_process()
        goes_on = process.loop.continue_process
        world.call_later(_lease(world) * (0.2 + 1.4 * rng.random()), f"{process.name} goes on", goes_on)


def full_disk(world: World, rng: Random) -> None:
    disk = choose_machine(world, rng).disk
    disk.full = True

    def mend() -> None:
        disk.full = False

    world.call_later(5.0 + 12.0 * rng.random(), "a disk has room again", mend)


def slow_disk(world: World, rng: Random) -> None:
    disk = choose_machine(world, rng).disk
    disk.slowness = 4.0 + 30.0 * rng.random()

    def mend() -> None:
        disk.slowness = 1.0

    world.call_later(8.0 * rng.random(), "a disk is fast again", mend)


def rot(world: World, rng: Random) -> None:
    """A bit flips in a snapshot at rest, and the machine restarts: until then its page cache hides it."""
    machine = choose_machine(world, rng)
    machine.disk.flip_bit()
    ask_operator(world)
    restart_machine(world, machine, draw_down_s(rng))


def ask_operator(world: World) -> None:
    """With no version left that every disk holds, somebody restores a directory (docs/rationale.md#22)."""
    world.call_later(OPERATOR_S, "the operator looks at the disks", partial(restore_if_all_is_lost, world))


def restore_if_all_is_lost(world: World) -> None:
    """When disks rotted or were put back, and no version that is still on offer is whole on all of them.

    Nobody is started again: while no version is offered by all, each slave looks at its disk again and again.
    """
    machines = world.machines.values()
    disks = [machine.disk for machine in machines]
    common = [v for v in world.books.offered_versions if all(v in disk.good_versions for disk in disks)]
    if not common and any(disk.harmed for disk in disks):
        world.look_everywhere()
        for machine in machines:
            machine.disk.restore_copy()


def old_snapshots(world: World, rng: Random) -> None:
    """A slave's directory is put back from a copy that was made a while ago."""
    machine = choose_machine(world, rng)
    copy = machine.disk.copy_directory()

    def put_back() -> None:
        machine.crash()
        machine.disk.put_back(copy)
        ask_operator(world)
        world.call_later(draw_down_s(rng), f"{machine.name} starts again", machine.start)

    if world.heap.now + 20.0 < world.scenario.quiet_at:
        world.call_later(4.0 + 14.0 * rng.random(), f"old snapshots are put back on {machine.name}", put_back)


def lose_disk(world: World, rng: Random) -> None:
    """A slave's disk is gone for good, and it starts on another machine with what its mirror holds.

    Not while its mirror holds nothing whole that is still on offer: then the run is lost, as it is without a mirror.
    """
    machine = choose_machine(world, rng)
    mirror = machine.mirror
    if mirror is None or not any(copy.good and v in world.books.offered_versions for v, copy in mirror.files.items()):
        return
    machine.crash()
    machine.disk.lose_disk()
    world.monitor.rare_event_occurred("disk_lost")
    world.call_later(draw_down_s(rng), f"{machine.name} starts on another machine", machine.start)


def lose_mirror(world: World, rng: Random) -> None:
    """A mirror is full or unreachable for a while; what lies there stays."""
    mirror = choose_machine(world, rng).mirror
    if mirror is not None:
        mirror.gone = True

        def mend() -> None:
            mirror.gone = False

        world.call_later(4.0 + 14.0 * rng.random(), "a mirror is there again", mend)


def slow_mirror(world: World, rng: Random) -> None:
    """A mirror takes longer than rounds do: it lags by versions."""
    mirror = choose_machine(world, rng).mirror
    if mirror is not None:
        mirror.slowness = 5.0 + 20.0 * rng.random()

        def mend() -> None:
            mirror.slowness = 1.0

        world.call_later(5.0 + 15.0 * rng.random(), "a mirror is fast again", mend)


# ---- master --------------------------------------------------------------------------------------------------------


def crash_master(world: World, rng: Random) -> None:
    world.crash_master()
    world.call_later(draw_down_s(rng), "the master starts again", world.start_master)


def lose_ledger(world: World, rng: Random) -> None:
    """The master's machine is gone for good; another master starts with what the ledger's mirror holds."""
    if world.master.disk.is_old_copy or not world.scenario.mirrors:
        return
    world.crash_master()
    world.master.lose_disk()
    world.monitor.rare_event_occurred("ledger_lost")
    world.call_later(draw_down_s(rng), "the master starts on another machine", world.start_master)


def pause_master(world: World, rng: Random) -> None:
    world.pause_master()
    world.call_later(_lease(world) * (0.2 + 1.5 * rng.random()), "the master wakes", world.wake_master)


def zombie_master(world: World, rng: Random) -> None:
    """A master is stopped and taken for dead; it wakes while its successor serves."""
    zombie = world.abandon_master()
    world.call_later(0.5 + 2.0 * rng.random(), "the master starts again", world.start_master)
    if zombie is not None:
        world.call_later(3.0 + 8.0 * rng.random(), "an old master wakes", zombie.loop.continue_process)


def slow_ledger(world: World, rng: Random) -> None:
    disk = world.master.disk
    disk.slowness = 10.0 + 60.0 * rng.random()

    def mend() -> None:
        disk.slowness = 1.0

    world.call_later(8.0 * rng.random(), "the ledger's disk is fast again", mend)


def full_ledger(world: World, rng: Random) -> None:
    disk = world.master.disk
    disk.full = True

    def mend() -> None:
        disk.full = False

    world.call_later(4.0 * rng.random(), "the ledger's disk has room again", mend)


def old_ledger(world: World, rng: Random) -> None:
    """With everybody down, a backup of the ledger is put back; every disk has a version of a round it does not know.

    So every slave can tell, and the first to register makes the master refuse; before that it answers no cluster. A
    backup that lacks no round nobody can tell from the newest (docs/rationale.md#2, #4), nor one that lacks only what
    was in memory alone, under `durability: async`, of slaves that have crashed since (seed 731).
    """
    copy = world.master.disk.copy_file()
    (known,) = copy.execute("SELECT coalesce(max(round), 0) FROM rounds").fetchone()

    def put_back() -> None:
        newest = [max((v.round for v in m.disk.good_versions), default=0) for m in world.machines.values()]
        if min(newest) <= known or world.master.disk.is_old_copy:
            return  # nobody could tell
        world.crash_master()
        world.master.disk.put_back(copy)
        for machine in world.machines.values():
            machine.start()
        world.call_later(1.0 + rng.random(), "the master starts on an old ledger", world.start_master)

    if world.heap.now + 20.0 < world.scenario.quiet_at:
        world.call_later(5.0 + 8.0 * rng.random(), "an old ledger is put back", put_back)


# ---- links and rooms -----------------------------------------------------------------------------------------------


def _ways(rng: Random, one: str, other: str) -> list[tuple[str, str]]:
    return rng.choice(([(one, other), (other, one)], [(one, other)], [(other, one)]))


def cut(world: World, rng: Random) -> None:
    """The control link of somebody to the master is parted, one way or both."""
    other = rng.choice([*world.clusters, *world.machines])
    until = world.heap.now + _lease(world) * 1.8 * rng.random()
    for sender, receiver in _ways(rng, other, "master"):
        world.network.cut_link(sender, receiver, until)


def cut_slave(world: World, rng: Random) -> None:
    """A slave and the master lose each other for longer than a lease: what it has prepared is in doubt."""
    machine = choose_machine(world, rng)
    until = world.heap.now + _lease(world) * (1.1 + rng.random())
    for sender, receiver in _ways(rng, machine.name, "master"):
        world.network.cut_link(sender, receiver, until)


def clog(world: World, rng: Random) -> None:
    """Somebody's control link passes almost nothing for a while."""
    world.network.clog_host(rng.choice([*world.clusters, *world.machines]), world.heap.now + 10.0 * rng.random())


def cut_data(world: World, rng: Random) -> None:
    """No bytes between a cluster and a slave, one way or both."""
    until = world.heap.now + 12.0 * rng.random()
    for sender, receiver in _ways(rng, choose_cluster(world, rng).name, choose_machine(world, rng).name):
        world.data.part_link(sender, receiver, until)


def clog_data(world: World, rng: Random) -> None:
    world.data.clog_link(choose_cluster(world, rng).name, world.heap.now + 12.0 * rng.random())


def partition(world: World, rng: Random) -> None:
    """A cluster is cut off from everybody, on both flows."""
    cluster = choose_cluster(world, rng)
    until = world.heap.now + _lease(world) * (0.5 + 1.5 * rng.random())
    for sender, receiver in _ways(rng, cluster.name, "master"):
        world.network.cut_link(sender, receiver, until)
    for machine in world.machines:
        world.data.part_link(cluster.name, machine, until)
        world.data.part_link(machine, cluster.name, until)


def whole_room(world: World, rng: Random) -> None:
    """The power goes: the master and all slaves die, and come back one by one."""
    crash_master(world, rng)
    for machine in world.machines.values():
        machine.crash()
        world.call_later(draw_down_s(rng), f"{machine.name} starts again", machine.start)
    world.monitor.rare_event_occurred("room")


# ---- for good ------------------------------------------------------------------------------------------------------


def kill_for_good(world: World, rng: Random) -> list[str]:
    """A cluster is gone with all its machines, and nobody starts it again."""
    cluster = choose_cluster(world, rng)
    cluster.crash_for_good()
    return [cluster.name]


def cut_for_good(world: World, rng: Random) -> list[str]:
    """A cluster trains on, and nobody hears it: not the master, not the slaves."""
    name = choose_cluster(world, rng).name
    for other in ("master", *world.machines):
        for sender, receiver in ((name, other), (other, name)):
            world.network.cut_link(sender, receiver, FOR_EVER)
            world.data.part_link(sender, receiver, FOR_EVER)
    return [name]


def hang_for_good(world: World, rng: Random) -> list[str]:
    """A trainer stands still, and its agent heartbeats on."""
    cluster = choose_cluster(world, rng)
    cluster.hang_trainer(FOR_EVER)
    return [cluster.name]


def lose_mirror_for_good(world: World, rng: Random) -> list[str]:
    """A mirror is never there again: it must hold up nobody.

    But its own slave, if that starts with an empty disk: the run must not begin anew for that (registration.py).
    """
    machine = choose_machine(world, rng)
    if machine.mirror is not None and machine.process is not None and machine.disk.good_versions:
        machine.mirror.gone = True
    return []
