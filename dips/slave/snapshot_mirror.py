"""The thread that maintains a slave's mirror: what is in it, what it copies next, and what it brings back."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import wait
from functools import partial
from itertools import chain, count
from pathlib import Path
from random import Random

from dips.dataclass import dataclass
from dips.errors import Corrupt, DipsError, FailedMirror, Stale
from dips.ids import VersionId
from dips.outer.kernel_pool import WorkMeter
from dips.protocol.events import MirrorReport
from dips.slave.mirror_plan import STALL_S, MirrorJob, MirrorJobKind, MirrorPlan, Restored
from dips.store.mirror import IncompleteCopy, MirrorStore, bring_back, copy_out, list_versions, read_copy
from dips.tasks import call_apart
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff


@dataclass(frozen=True, slots=True)
class MirrorListing:
    """The versions in a slave's mirror, ascending by round."""

    whole: tuple[VersionId, ...] = ()
    outdated: tuple[
        VersionId, ...
    ] = ()  # with other layers, from before a rebalance, damaged or incomplete: to be replaced or deleted
    reason: str = ""  # why the last one that is not in `whole` was ignored


def list_copies(
    store: MirrorStore,
    run: str,
    slave: str,
    log: Log,
    layers: Collection[int] | None = None,
    rotten: Mapping[VersionId, str] | None = None,
    on_read: Callable[[int], None] = lambda _: None,
) -> MirrorListing:
    """List the versions whose copy is complete by its manifest and size; others are ignored, with a warning in the log.

    layers  layers that this slave holds, if known: a copy of other layers may have the same name
    rotten  versions whose bytes were found damaged → their `folder_state` then: not read again until that changes
    on_read  called with 0 before each version
    """
    whole, outdated, reason = list[VersionId](), list[VersionId](), ""
    for version in list_versions(store):
        on_read(0)
        try:
            _, manifest = read_copy(store, run, slave, version)
        except Corrupt as error:
            reason = str(error)
            if isinstance(error, IncompleteCopy):  # the others may be another's, or of another release: for a person
                outdated.append(version)
        else:
            held = sorted(record.index for record in manifest.layers)
            if layers is not None and held != sorted(layers):
                reason = (
                    f"{store.url}/{version}: holds the layers {held}, this slave {sorted(layers)} since a rebalance"
                )
            elif rotten and version in rotten and rotten[version] == store.folder_state(str(version)):
                reason = f"{store.url}/{version}: its bytes are not its digests'; it is replaced or deleted"
            else:
                whole.append(version)
                continue
            outdated.append(version)
        log.warning("mirror_passed_over", version=str(version), mirror=store.url, reason=reason)
    return MirrorListing(tuple(whole), tuple(outdated), reason)


# ---- snapshot mirror ------------------------------------------------------------------------------------------------
# The thread that maintains a slave's mirror: carries out the jobs of MirrorPlan, beside everything else that the slave
# does.
#
# What must stay true: the shard's thread and the event loop never wait for it; they set the wanted versions, and read a
# report. A mount that hangs must not keep the process alive, nor a slave from its master, so its threads are daemons,
# and who waits gives up when nothing moves. Before each Register of a slave that serves no version, `restore` copies
# back versions that are newer in the mirror than on the disk (on a new machine, all of them), and those that the master
# asked for, since all others have them. Damaged copies are remembered: each is read once, and not before each Register.


BACKOFF_S = (1.0, 60.0)  # first and longest pause between two tries of a mirror that fails
IDLE_S = 3600.0  # longest wait of the thread if nothing happens
TOLD_S = 30.0  # between two log lines of a restore that goes on
LOOK_S = 1.0  # between two looks at a restore that is waited for
SILENT_S = 600.0  # longest silence of a restore whose bytes move: this disk may be silent for minutes in one fsync
CLOSE_S = 10.0  # longest wait at the end for a job, or a restore, to end at its next piece


@dataclass(slots=True)
class AwaitedRestore:
    """How long a restore may move nothing, and whether somebody waits for it still."""

    limit_s: float
    given_up: bool = False


class SnapshotMirror:
    """One slave's mirror; `want` and `report` may be called from any thread, and return at once."""

    def __init__(
        self,
        store: MirrorStore,
        directory: Path,
        run: str,
        slave: str,
        log: Log,
        clock: Callable[[], float],
        meter: WorkMeter | None = None,
    ) -> None:
        """`meter` counts the bytes that are restored, which shows progress however long it takes."""
        self._store, self._directory, self._run, self._slave = store, directory, run, slave
        self._log, self._clock, self._meter = log, clock, meter or WorkMeter()
        self._plan = MirrorPlan(Backoff(*BACKOFF_S, Random()))
        self._layers: tuple[int, ...] | None = None  # None before the master has named them
        self._rotten: dict[VersionId, str] = {}  # copies found damaged, with their `folder_state` then
        self._job = threading.Lock()  # held while bytes move, in either direction
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._keep, name="mirror", daemon=True)

    def start(self) -> None:
        """Start the thread; it copies when the master has named versions."""
        self._thread.start()

    def close(self) -> None:
        """Begin no other job, and end the present one, or a restore, at its next piece: the next process in this
        directory removes what is unfinished there. One that hangs is not waited for.
        """
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._job.acquire(timeout=CLOSE_S):
            self._job.release()

    def want(self, versions: tuple[VersionId, ...]) -> None:
        """Set the versions that the mirror should hold, as the master named them."""
        with self._changed:
            self._plan.want(versions)
            self._changed.notify()

    def report(self) -> MirrorReport:
        """Return the versions that the mirror holds, and why it holds no more."""
        with self._changed:
            return self._plan.report(self._clock())

    def bind_layers(self, layers: tuple[int, ...]) -> None:
        """Set the layers of this slave; copies with other layers do not count."""
        with self._changed:
            if self._layers != layers:
                self._layers = layers
                self._plan.list_again()
                self._changed.notify()

    # ---- before the slave serves -------------------------------------------------------------------------------------

    def begin_restore(
        self,
        on_disk: tuple[VersionId, ...],
        look_for: tuple[VersionId, ...],
        done: Callable[[Restored | Exception], None],
    ) -> None:
        """Do `restore` on a daemon thread, so that a mount that hangs does not keep the process alive; `done` gets its
        result or its error there.
        """

        def restore() -> None:
            result: Restored | Exception
            try:
                result = self.restore(on_disk, look_for)
            except Exception as error:  # noqa: BLE001 (the caller decides by its class)
                result = error
            done(result)

        threading.Thread(target=restore, name="restore", daemon=True).start()

    def restore(self, on_disk: tuple[VersionId, ...], look_for: tuple[VersionId, ...] = ()) -> Restored:
        """Restore every version of a later round than all on the disk, the newest first, and those of `look_for`.

        Waits for a job that is being done, as long as it moves. Raise FailedMirror if the mirror fails, or nothing
        moves: what hangs then ends at its next piece.
        """
        waiting = AwaitedRestore(STALL_S)

        def restore() -> Restored:
            while not self._job.acquire(timeout=LOOK_S):
                self._require_wanted(waiting)
            try:
                return self._bring_back(set(on_disk), set(look_for), waiting)
            except FailedMirror as error:  # told before the next job begins, whose failure it is not
                self._tell(partial(self._plan.on_failed, str(error), self._clock()))
                raise
            finally:
                self._job.release()

        begun, restored = self._clock(), call_apart(restore, "restores")
        while not wait([restored], LOOK_S).done:
            self._give_up_if_silent(waiting, begun)
        return restored.result()

    def _give_up_if_silent(self, waiting: AwaitedRestore, begun: float) -> None:
        with self._changed:
            now = self._clock()
            if now - max(begun, self._plan.moved_at) < waiting.limit_s:
                return
            waiting.given_up = True
            reason = f"{self._store.url}: nothing has moved for {waiting.limit_s:g} s"
            if not self._plan.stalls(now):  # it is a restore that hangs, and no job of the plan
                self._plan.on_failed(reason, now)
        raise FailedMirror(reason)

    def _bring_back(self, on_disk: set[VersionId], look_for: set[VersionId], waiting: AwaitedRestore) -> Restored:
        listing = self._list_mirror()  # the next Register reports it
        newest = max((v.round for v in on_disk), default=0)
        brought, rotten, reason = list[VersionId](), False, listing.reason
        for version in reversed(listing.whole):
            if version.round <= newest and version not in look_for - on_disk:
                continue
            try:
                self._bring_back_one(version, waiting)
                brought.append(version)
            except Corrupt as error:
                reason = reason or str(error)
                self._log.error("mirror_passed_over", version=str(version), reason=str(error))
                self._rotten[version] = self._store.folder_state(str(version))
                rotten = True
        if rotten:
            self._list_mirror()  # so that the report omits copies that were found damaged just now
        if not listing.whole and not reason:
            reason = f"its mirror {self._store.url} holds no snapshot of it either: is it mounted?"
        return Restored(tuple(brought), reason)

    def _bring_back_one(self, version: VersionId, waiting: AwaitedRestore) -> None:
        self._require_wanted(waiting)
        self._put_aside(self._directory / str(version))
        begun = told = self._clock()
        nbytes = 0
        self._log.info("restoring", version=str(version), mirror=self._store.url)

        def on_moved(moved: int) -> None:
            nonlocal nbytes, told
            self._on_moved(moved)
            self._require_wanted(waiting)
            waiting.limit_s = SILENT_S
            nbytes += moved
            self._meter.add(moved)
            if self._clock() - told >= TOLD_S:
                told = self._clock()
                self._log.info("restoring", version=str(version), done_mb=nbytes // 10**6, took_s=round(told - begun))

        _, manifest = read_copy(self._store, self._run, self._slave, version)
        doing, is_wanted = f"restores {version} from its mirror", lambda: not waiting.given_up
        with self._meter.long_work(doing, manifest.parameter_bytes, is_wanted):
            bring_back(self._store, self._directory, self._run, self._slave, version, on_moved)
        self._log.info("restored", version=str(version), mirror=self._store.url, took_s=self._clock() - begun)

    def _list_mirror(self) -> MirrorListing:
        listing = list_copies(
            self._store, self._run, self._slave, self._log, self._layers, self._rotten, self._on_moved
        )  # fmt: skip
        self._tell(partial(self._plan.on_listed, listing.whole, listing.outdated))
        return listing

    def _put_aside(self, damaged: Path) -> None:
        """Rename a damaged snapshot that is in the place of a version, for a person to look at and remove; a former one
        of this version makes room, unless it cannot be removed.
        """
        if not damaged.exists():
            return
        for suffix in chain([""], (f"-{number}" for number in count(2))):
            kept = damaged.with_name(f"damaged-{damaged.name}{suffix}")
            shutil.rmtree(kept, ignore_errors=True)
            if not kept.exists():
                break
        damaged.rename(kept)
        self._log.error("damaged_snapshot_kept", path=str(kept), remedy="look at it, and remove it: it takes room")

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        while self._wait_until_due():
            with self._job:
                self._do_next_job()

    def _wait_until_due(self) -> bool:
        """Return True when a job is due; False at the end."""
        with self._changed:
            while not self._ended:
                now = self._clock()
                wait_s = self._plan.next_deadline(now) - now
                if wait_s <= 0:
                    return True
                self._changed.wait(min(wait_s, IDLE_S))
        return False

    def _do_next_job(self) -> None:
        """Do the job that is due now, which may be another one, or none, after a restore has ended."""
        with self._changed:
            job = None if self._ended else self._plan.next_job(self._clock())
        if job is None:
            return
        try:
            self._do(job)
        except (DipsError, OSError) as error:
            self._log.warning("mirror_fails", job=job.kind.value, reason=str(error))
            self._tell(partial(self._plan.on_failed, str(error), self._clock()))

    def _do(self, job: MirrorJob) -> None:
        if job.kind is MirrorJobKind.LIST:
            self._list_mirror()
            return
        if job.kind is MirrorJobKind.DELETE:
            for version in job.versions:
                self._store.remove_path(str(version))
                self._on_moved(0)
            self._tell(partial(self._plan.on_done, job))
            return
        begun = self._clock()
        copy_out(self._store, self._directory, job.versions[0], self._on_moved)
        self._tell(partial(self._plan.on_done, job))
        self._log.info("mirrored", version=str(job.versions[0]), took_s=self._clock() - begun)

    def _tell(self, happened: Callable[[], None]) -> None:
        with self._changed:
            happened()

    def _on_moved(self, _: int) -> None:
        with self._changed:
            self._plan.on_moved(self._clock())
            if self._ended:
                raise Stale("its slave ends")

    @staticmethod
    def _require_wanted(waiting: AwaitedRestore) -> None:
        if waiting.given_up:
            raise Stale("nobody waits for this restore any more")
