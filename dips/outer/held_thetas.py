"""The θ that a slave serves, the older ones in memory, and who reads each.

An older θ stays while pulls read it. Those beyond the pinned ones take the place of θ′: `move_readers` moves their
readers to a file of the same bytes, one after another, and the last of them frees the bank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

from dips.dataclass import dataclass
from dips.errors import LocalProtocolError, StaleVersion
from dips.ids import PullId, VersionId
from dips.outer.pool import Arrays, Bank


@dataclass(slots=True)
class Theta:
    """θ of one version in memory, and who reads it."""

    version: VersionId
    bank: Bank
    pulls: set[PullId] = field(default_factory=set)
    moving: bool = False  # its readers go over to a file; it takes no new ones


class HeldThetas:
    """Which θ are here. Who changes `head` gives its readers what they read: see `leave_head`."""

    def __init__(self, give_back: Callable[[Bank], None], pinned: int) -> None:
        self._give_back, self._pinned = give_back, pinned
        self.head: Theta | None = None  # that is served
        self.older: list[Theta] = []  # oldest first
        self._from_file: dict[PullId, VersionId] = {}

    # ---- what is held --------------------------------------------------------------------------------

    @property
    def pins(self) -> dict[PullId, VersionId]:
        """Every pull that may still read, with the version that it reads."""
        in_memory = {pull: theta.version for theta in self._all() for pull in sorted(theta.pulls)}
        return {**self._from_file, **in_memory}

    @property
    def older_versions(self) -> tuple[VersionId, ...]:
        """Older versions whose readers hold a bank and are not being moved, oldest first."""
        return tuple(theta.version for theta in self.older if not theta.moving)

    @property
    def excess_versions(self) -> int:
        """How many of those are more than the pool has pinned banks for."""
        return max(0, len(self.older_versions) - self._pinned)

    def find(self, version: VersionId) -> Theta:
        """Return θ of this version; raise StaleVersion if it is not held, or its readers are being moved."""
        head = self.head
        if not self.older and head is not None and head.version == version and not head.moving:
            return head  # as nearly always
        for theta in self._all():
            if theta.version == version and not theta.moving:
                return theta
        raise StaleVersion(f"{version} is not held; held: {self.describe()}")

    def find_read(self, version: VersionId) -> Theta | None:
        """The older θ of this version that pulls read, where they are."""
        return next((t for t in self.older if t.version == version and not t.moving), None)

    def describe(self) -> str:
        return ", ".join(str(theta.version) for theta in self._all()) or "nothing"

    # ---- readers -------------------------------------------------------------------------------------

    def pin_version(self, pull: PullId, version: VersionId) -> Arrays:
        """Keep θ of `version` for a pull and return it; raise StaleVersion if it is not held."""
        self._refuse_second(pull)
        theta = self.find(version)
        theta.pulls.add(pull)
        return theta.bank.arrays

    def pin_file(self, pull: PullId, version: VersionId) -> None:
        """Take note of a pull that reads an older version from a file: it holds no bank."""
        self._refuse_second(pull)
        self._from_file[pull] = version

    def move_readers(self, version: VersionId) -> tuple[PullId, ...]:
        """Begin to move an older version's readers to a file and return them; `on_reader_moved` ends it for each."""
        for theta in self.older:
            if theta.version == version and not theta.moving:
                theta.moving = True
                return tuple(sorted(theta.pulls))
        raise LocalProtocolError(f"{version} is no older version in memory: {', '.join(map(str, self.older_versions))}")

    def on_reader_moved(self, pull: PullId) -> None:
        """End the pull's reads from banks in memory; the last reader frees a bank. No effect if the pull is over."""
        for theta in self.older:
            if theta.moving and pull in theta.pulls:
                self._from_file[pull] = theta.version
                theta.pulls.discard(pull)
        self._free_unread()

    def unpin(self, pull: PullId) -> None:
        """End a pin; the last one of an older version frees it. An unknown pull has nothing to end."""
        self._from_file.pop(pull, None)
        for theta in self._all():
            theta.pulls.discard(pull)
        self._free_unread()

    # ---- what comes and goes -------------------------------------------------------------------------

    def leave_head(self) -> None:
        """Let go of the served θ: to its readers, if it has any."""
        if self.head is None:
            return
        if self.head.pulls:
            self.head.bank.holder = f"older θ {self.head.version}"
            self.older.append(self.head)
        else:
            self._give_back(self.head.bank)
        self.head = None

    def _free_unread(self) -> None:
        for theta in [t for t in self.older if not t.pulls]:
            self.older.remove(theta)
            self._give_back(theta.bank)

    def _refuse_second(self, pull: PullId) -> None:
        if pull in self.pins:
            raise LocalProtocolError(f"pull {pull} already reads {self.pins[pull]}")

    def _all(self) -> list[Theta]:
        return [*self.older, self.head] if self.head else list(self.older)
