"""A slave's registration with its master until Hold, and the heartbeats that renew it."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from math import inf
from pathlib import Path
from random import Random

from dips.dataclass import replace
from dips.errors import Busy, Denied, FailedDisk, FailedMirror, Stale, Unavailable
from dips.files import read_boot_id
from dips.ids import VersionId
from dips.protocol.effects import LoadVersion, Registered, RegisterLater
from dips.protocol.events import SlaveRegistered
from dips.protocol.heartbeats import LiveTransfers, OrderWait, SlaveHeartbeat, SlaveHeartbeatAnswer, Transfer
from dips.slave.mirror_plan import Restored
from dips.slave.ports import (
    Actions,
    CallMaster,
    EndSlave,
    KeepInMirror,
    Meters,
    Read,
    ReadSnapshot,
    RestoreFromMirror,
    ShardMethod,
    ShardWork,
    SlaveIdentity,
    SlaveTiming,
    Standing,
    WriteLog,
)
from dips.slave.shard import Followed, Unfollowed
from dips.telemetry.logs import Log
from dips.transport.backoff import Backoff

# ---- last process ---------------------------------------------------------------------------------------------------
# The last process that held a slave's directory, as proof to the master that the next one there may replace it.
#
# The master takes another process of a slave that was heard just now for a rival. A process that holds the directory's
# lock knows that the former one has ended, and proves that it holds the directory by the former nonce, which no other
# peer knows: so a slave that is restarted at once need not wait. A copy of the directory proves nothing, since its lock
# is another file; nor does a clone of its disk, or a file system that another host has mounted, too: there the former
# process may live where the machine was started another time. Not fsynced: after a reboot the old process has been
# silent for long enough.


FILE = "process.json"
NONCE_CHARS = 64  # most characters; ours have 32


class LastProcess:
    """The file of one directory, owned by the holder of the directory's lock."""

    def __init__(self, directory: Path, lock: Path, log: Log) -> None:
        self._path, self._lock, self._log = directory / FILE, lock, log

    def read_nonce(self) -> str:
        """Return the nonce of the last process here that the master gave an incarnation; empty if unknown."""
        try:
            found = json.loads(self._path.read_text())
            nonce = found["nonce"]
            ours = (
                isinstance(nonce, str) and len(nonce) <= NONCE_CHARS and found.items() >= self._describe_lock().items()
            )
            return nonce if ours else ""
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            self._log.warning("last_process_not_read", path=str(self._path), error=str(error))
            return ""

    def keep_nonce(self, nonce: str) -> None:
        """Keep this process's nonce, at each registration, since the directory may have been made anew; on a full disk
        its successor waits two heartbeats.
        """
        aside = self._path.with_suffix(".new")
        try:
            aside.write_text(json.dumps({"nonce": nonce, **self._describe_lock()}))
            aside.replace(self._path)
        except OSError as error:
            self._log.warning("last_process_not_written", path=str(self._path), error=str(error))

    def _describe_lock(self) -> dict[str, object]:
        """Return what tells this directory's lock from all others that somebody may hold now."""
        return {"lock_inode": self._lock.stat().st_ino, "boot": read_boot_id()}


# ---- registration ---------------------------------------------------------------------------------------------------
# Pure: `now` is an argument, actions are returned (ports.py). A master that does not answer is asked again for ever,
# with backoff. A slave that serves no version, or is asked for one, restores from its mirror before each Register. With
# an empty disk, and a mirror that fails or no room, it does not register at all, since the run might begin anew for
# that; with an old snapshot it says to the master why there is no newer one. What must stay true: the answer to a
# heartbeat is applied only to the registration under which it was sent (a slave that registers again loses its open
# round); heartbeats go on whatever the shard is busy with.


RETRIED = (Unavailable, Busy, Stale, OSError)  # a Register is repeated; OSError: our disk cannot be listed
RENEWED = (*RETRIED, Denied)  # by who was let in once: its certificate has ended, and is renewed in place


class RegistrationPhase(Enum):
    """PAUSED → ASKING → (PAUSED → ASKING)* → SERVING; again from PAUSED whenever a heartbeat's answer demands it."""

    PAUSED = "will register"
    ASKING = "registers, or does what it was told"
    SERVING = "was told Hold"


class Registration:
    """The state machine of registration."""

    def __init__(
        self,
        identity: SlaveIdentity,
        timing: SlaveTiming,
        rng: Random,
        meters: Callable[[], Meters] = Meters,
    ) -> None:
        self._identity, self._timing, self._meters = identity, timing, meters
        self.phase = RegistrationPhase.PAUSED
        self.number = 0  # number of this registration; rises whenever one begins
        self._registered: Registered | None = None
        self._again_at = 0.0  # while PAUSED
        self._backoff = Backoff(*timing.backoff_s, rng)
        self._said = ""  # why it waits, as last logged
        self._look_for: tuple[VersionId, ...] = ()  # versions that the master asked for in its last answer
        self._restored: str | None = None  # since the last Register, with the reason why no more was restored

    def next_deadline(self) -> float:
        return self._again_at if self.phase is RegistrationPhase.PAUSED else inf

    def tick(self, now: float) -> Actions:
        """Register, if it is due."""
        if now < self.next_deadline():
            return []
        self.phase = RegistrationPhase.ASKING
        self.number += 1
        return [self._describe()]

    def request_again(self, number: int, now: float) -> Actions:
        """Register again, unless a later registration than `number` has begun, or this one is not complete."""
        if number != self.number or self.phase is not RegistrationPhase.SERVING:
            return []
        self._sleep_for(0.0, now)
        return self.tick(now)

    def on_described(self, described: SlaveRegistered | Exception, now: float) -> Actions:
        """Send a Register with what the shard holds, after a restore from the mirror if one is needed."""
        if isinstance(described, Exception):
            return self._on_failure(described, now)
        mirror, restored = self._meters().mirror, self._restored
        sought = not set(self._look_for) <= set(described.complete)
        if mirror is not None and restored is None and (described.memory is None or sought):
            return [RestoreFromMirror((*described.complete, *described.unread), self._look_for)]
        self._restored = None
        reasons = [reason for reason in (described.reason, restored) if reason]
        former, why = self._identity.former_nonce, "; ".join(reasons)
        return [CallMaster(replace(described, mirror=mirror, reason=why, former_nonce=former), self._timing.call_s)]

    def on_restored(self, work: RestoreFromMirror, restored: Restored | Exception, now: float) -> Actions:
        """Continue after a restore, or its failure, with which an old disk is used but an empty one is not."""
        if isinstance(restored, Restored):
            self._restored = restored.reason
            return [self._describe()]
        if not isinstance(restored, FailedDisk | OSError):
            return self._on_failure(restored, now)
        of_mirror = isinstance(restored, FailedMirror)
        reason = str(restored) if of_mirror else f"its disk takes no version from its mirror: {restored}"
        if work.on_disk or work.look_for:
            self._restored = reason
            fields = {"reason": reason, "done": "what is on the disk is used"}
            return [WriteLog("warning", "mirror_fails" if of_mirror else "restore_fails", fields), self._describe()]
        pause_s = self._backoff.next_pause_s()
        self._sleep_for(pause_s, now)
        return [WriteLog("error", "restore_waits", {"reason": reason, "again_in_s": pause_s})]

    def on_registered(self, registered: Registered | Exception, now: float) -> Actions:
        """Process the master's answer to a Register, or its failure."""
        if isinstance(registered, Exception):
            return self._on_failure(registered, now)
        self._registered = registered
        self._look_for = registered.order.look_for if isinstance(registered.order, RegisterLater) else ()
        return [ShardWork(ShardMethod.WELCOME, (registered,))]

    def on_welcomed(self, error: Exception | None, now: float) -> Actions:
        """Follow the answer's order after the shard has taken term, incarnation and layers; Stale comes from an old
        master.
        """
        if error is not None:
            return self._on_failure(error, now)
        assert self._registered is not None
        return [ShardWork(ShardMethod.FOLLOW, (self._registered.order,))]

    def on_followed(self, followed: Followed | Unfollowed | Read | Exception, now: float) -> Actions:
        """Continue after the shard has followed the order, could not, or returned what is to be read for it."""
        if isinstance(followed, Exception):
            return self._on_failure(followed, now)
        registered = self._registered
        assert registered is not None
        if callable(followed):
            assert isinstance(registered.order, LoadVersion)
            return [ReadSnapshot(registered.order, followed)]
        self._backoff.reset()
        if isinstance(followed, Unfollowed):
            again_s = self._timing.backoff_s[1]
            self._sleep_for(again_s, now)
            return [WriteLog("error", "register_order_failed", {"why": followed.reason, "again_in_s": again_s})]
        if followed is Followed.SERVES:
            self.phase, self._said = RegistrationPhase.SERVING, ""
            fields = {"sinc": registered.sinc, "term": registered.term, "version": str(registered.head)}
            return [WriteLog("info", "ready", fields)]
        order = registered.order
        if isinstance(order, RegisterLater):
            self._sleep_for(order.retry_after_s, now)
            said, self._said = self._said, order.reason
            if said == order.reason:
                return []
            fields = {"why": order.reason, "again_in_s": order.retry_after_s}
            return [WriteLog("info", "register_waits", fields)]
        self._sleep_for(0.0, now)
        return [WriteLog("info", "register_order_done", {"order": str(order)}), *self.tick(now)]

    def on_read(self, order: LoadVersion, error: Exception | None) -> Actions:
        """Pass the result of reading the snapshot to the shard."""
        return [ShardWork(ShardMethod.END_LOAD, (order, error))]

    def _describe(self) -> ShardWork:
        """Return the work that says what the shard holds, after it has read the versions that the master asked for."""
        return ShardWork(ShardMethod.DESCRIBE, (self._identity, self._look_for))

    def _on_failure(self, error: Exception, now: float) -> Actions:
        if not isinstance(error, RETRIED if self._registered is None else RENEWED):
            return [EndSlave(error)]
        pause_s = self._backoff.next_pause_s()
        self._sleep_for(pause_s, now)
        fields = {"master": self._identity.master, "why": str(error), "again_in_s": pause_s}
        return [WriteLog("warning", "register_failed", fields)]

    def _sleep_for(self, seconds: float, now: float) -> None:
        self.phase, self._again_at = RegistrationPhase.PAUSED, now + seconds


class Heartbeats:
    """Sends a heartbeat every `heartbeat_s`, at most one at a time, and acts on the answers."""

    def __init__(
        self,
        identity: SlaveIdentity,
        timing: SlaveTiming,
        registration: Registration,
        standing: Callable[[], Standing],
        transfers: Callable[[], tuple[Transfer, ...]],
        meters: Callable[[], Meters],
        waits: Callable[[float], tuple[OrderWait, ...]],
    ) -> None:
        self._identity, self._timing, self._registration = identity, timing, registration
        self._standing, self._transfers, self._meters, self._waits = standing, transfers, meters, waits
        self._due_at: float | None = None
        self._under_way = False
        self._sent: tuple[int, int] = (0, 0)  # registration number and sinc of the open call
        self._failure = ""  # the last heartbeat's, as logged; empty: it was answered
        self._dropping = False
        self._live: SlaveHeartbeatAnswer | None = None  # the newest list of live transfers, not yet applied
        self._list: LiveTransfers | None = None  # the last list received
        self._list_of: tuple[int, int] = (0, 0)  # registration number and term under which it was received

    def next_deadline(self) -> float:
        return inf if self._under_way or self._due_at is None else self._due_at

    def tick(self, now: float) -> Actions:
        """Send a heartbeat if one is due; none before the first registration, which gives the slave its incarnation."""
        if self._due_at is None:
            self._due_at = now + self._timing.heartbeat_s
        if now < self.next_deadline():
            return []
        self._due_at = now + self._timing.heartbeat_s
        standing = self._standing()
        if standing.sinc == 0:
            return []
        self._under_way = True
        self._sent = (self._registration.number, standing.sinc)
        return [CallMaster(self._make_heartbeat(standing, now), max(self._timing.heartbeat_s, 1.0))]

    def _make_heartbeat(self, standing: Standing, now: float) -> SlaveHeartbeat:
        meters = self._meters()
        return SlaveHeartbeat(
            slave=self._identity.slave,
            sinc=standing.sinc,
            term=standing.term,
            memory=standing.memory,
            staged=standing.staged,
            transfers=self._transfers(),
            pool_used=standing.pool_used,
            pool_limit=standing.pool_limit,
            bytes_in=meters.bytes_in,
            bytes_out=meters.bytes_out,
            persist_s=meters.persist_s,
            apply_s=meters.apply_s,
            work_bytes=meters.work_bytes,
            mirror=meters.mirror,
            disk_free=meters.disk_free,
            disk_total=meters.disk_total,
            live=self._list.number if self._list is not None and self._list_of == self._known_as(standing) else 0,
            waits=self._waits(now),
            work=meters.work,
        )

    def _known_as(self, standing: Standing) -> tuple[int, int]:
        """Return the key under which a list is valid: another master, or one with an old ledger, numbers its lists
        anew.
        """
        return self._registration.number, standing.term

    def on_answer(self, answer: SlaveHeartbeatAnswer | Exception, now: float) -> Actions:
        """Process the master's answer to a heartbeat, or its failure."""
        self._under_way = False
        if self._due_at is not None:
            self._due_at = max(self._due_at, now)
        if isinstance(answer, Exception):
            return self._on_failure(answer, now)
        actions: Actions = []
        if self._failure:
            self._failure = ""
            actions.append(WriteLog("info", "master_back", {"master": self._identity.master}))
        number, sinc = self._sent
        standing = self._standing()
        if answer.register or answer.term > standing.term:
            # Also with a master of a lower term, so that it learns which term was seen.
            return actions + self._registration.request_again(number, now)
        if answer.term == standing.term and sinc == standing.sinc:
            self._keep_list(answer)
            if answer.mirror:
                actions.append(KeepInMirror(answer.mirror))
            return actions + self._drop_unlisted()
        return actions

    def _keep_list(self, answer: SlaveHeartbeatAnswer) -> None:
        """Keep the answer's list of live transfers; an answer without one refers to the list that this slave has."""
        came_under = (self._sent[0], answer.term)
        if answer.live is not None:
            self._list, self._list_of = answer.live, came_under
        if self._list_of == came_under:
            self._live = replace(answer, live=self._list)

    def _on_failure(self, error: Exception, now: float) -> Actions:
        if isinstance(error, Stale):
            refused = WriteLog("warning", "heartbeat_refused", {"why": str(error)})
            return [refused, *self._registration.request_again(self._sent[0], now)]
        if not isinstance(error, Unavailable | Busy | Denied):
            return [EndSlave(error)]
        known, self._failure = self._failure, "heartbeat_refused" if isinstance(error, Denied) else "master_silent"
        fields = {"master": self._identity.master, "why": str(error)}
        return [WriteLog("warning", self._failure, fields)] if self._failure != known else []

    def _drop_unlisted(self) -> Actions:
        """Drop what is not live, apart from heartbeats, since the shard's thread may be busy for minutes.

        Nothing is asked of it where nothing is open; what an order opens meanwhile is compared with the next list.
        """
        if self._dropping or self._live is None or not self._standing().serves:
            return []
        answer, self._live, self._dropping = self._live, None, True
        return [ShardWork(ShardMethod.DROP_UNLISTED, (answer,))]

    def on_dropped(self, dropped: list[str] | Exception) -> Actions:
        """Log what the shard has dropped, and apply a newer list if one has come."""
        self._dropping = False
        if isinstance(dropped, Exception):
            return [EndSlave(dropped)]
        fields = {"dropped": dropped, "why": "open here, and not live at the master"}
        logged: Actions = [WriteLog("warning", "healed", fields)] if dropped else []
        return logged + self._drop_unlisted()
