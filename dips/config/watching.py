"""Watches a daemon's file while it runs: keys that may change are used at once, all others are reported one by one.

An incomplete or wrong file is reported, and the former values stay in use, as for certificates
(dips/transport/tls.py). The meaning of keys is unknown here: the daemon tells which keys it takes over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from dips.config.reading import list_files
from dips.config.section import Section
from dips.errors import ConfigError
from dips.files import FileStamp, stamp_file
from dips.tasks import call_apart

LOOK_S = 1.0  # pause between two checks of the files' dates
MOST_VALUE = 80  # characters of a value in a message
Report = Callable[[str], None]
File = TypeVar("File", bound=Section)

_SET = "the run began with it; `dips set` changes the run's, without a restart"
_AGREED = "master, slaves and clusters agreed on it when the run was made"
_OPEN = "the port is open since the start: restart this process"
_RANKS = "the ranks read it when they start: it counts from the next start of the training command"
_MEMORY = "memory is allocated at the start: restart this slave (`dips drain` first, so that no round is lost)"

# Why a key cannot change while the daemon runs: the first matching row. Other keys are read at the start.
REASONS: tuple[tuple[str, str], ...] = (
    *((f"shared.outer.{key}", _SET) for key in ("lr", "momentum", "clip.norm", "clip.relative")),
    ("shared.penalty.gates*", _AGREED),
    ("shared.penalty.*", _SET),
    ("shared.stop.*", _SET),
    ("shared.data.epochs", _SET),
    ("shared.heartbeat_s", "slaves and clusters go by it: restart all of them with the new file"),
    ("shared.*", _AGREED),
    ("master.timing.window_s", _SET),
    ("slaves", "layers lie on the slaves of the ledger: `dips rebalance` moves them to others"),
    ("*.listen", _OPEN),
    ("*.lanes", _OPEN),
    ("*.metrics", _OPEN),
    ("*.http", _OPEN),
    ("slaves.*.supervisor", "the master reads it when it starts: restart the master"),
    ("*.slots", _MEMORY),
    ("*.pinned", _MEMORY),
    ("*.directory", "it is locked as long as this process runs: stop it, move the directory, start it"),
    *((key, _RANKS) for key in ("overlap", "fragments", "install", "on_divergence")),
    ("tls", "the files are looked at each second, renew them in place; another path, or none, takes a restart"),
)
_OTHERWISE = "it is read at the start: restart this process"


class ConfigWatch(Generic[File]):
    """Watches one daemon's file, and keeps the configuration in use."""

    def __init__(
        self,
        path: Path,
        config: File,
        load: Callable[[Path], File],
        changeable: Collection[str],
        report: Report,
        ignored: Collection[str] = (),
    ) -> None:
        """Start with the configuration in use; the first look reads the file, which may have changed since it was read.

        changeable  keys that the daemon takes over
        report      called once for each change that cannot be used
        ignored     patterns of keys of other processes
        """
        self.path, self.in_use = path, config
        self._load, self._changeable, self._report, self._ignored = load, changeable, report, tuple(ignored)
        self._files = list_files(path)
        self._stamp: tuple[FileStamp, ...] = ()  # of the last look
        self._said: dict[str, Any] = {}

    def look_again(self, now: bool = False) -> tuple[File, list[str]] | None:
        """Return the new file and the keys to take over, None if there are none; `now`: read it even if no date has
        changed.
        """
        if _stamp_of(self._files) == self._stamp and not now:
            return None
        self._files = list_files(self.path)
        self._stamp = _stamp_of(self._files)
        try:
            new = self._load(self.path)
        except ConfigError as error:
            self._report(f"the changed file is not used: {error}")
            return None
        return self._take_over(new)

    def _take_over(self, new: File) -> tuple[File, list[str]] | None:
        taken = dict[str, Any]()
        found = list(find_changes(self.in_use.model_dump(mode="json"), new.model_dump(mode="json")))
        for key, before, after in found:
            section = key.partition(".")[0]
            if section in self._changeable:
                taken[section] = getattr(new, section)
            elif (
                not any(fnmatchcase(key, pattern) for pattern in self._ignored)
                and (key, after) not in self._said.items()
            ):
                self._said[key] = after
                self._report(f"{key}: {_spell(before)} → {_spell(after)} is not used: {explain_key(key)}")
        for key in self._said.keys() - {key for key, _, _ in found}:
            del self._said[key]  # changed back; the next change is reported again
        if not taken:
            return None
        self.in_use = self.in_use.model_copy(update=taken)
        return self.in_use, sorted(taken)


async def keep_watching(
    watch: ConfigWatch[File], apply: Callable[[File, list[str]], None], hurry: asyncio.Event | None = None
) -> None:
    """Check the file once a second, and as soon as `hurry` is set (SIGHUP), until cancelled.

    `report` of the watch is called on another thread, `apply` on the loop.
    """
    hurry = hurry or asyncio.Event()
    while True:
        asked = hurry.is_set()
        hurry.clear()
        look = call_apart(partial(watch.look_again, asked), "file looks")  # its disk may be silent
        if (found := await asyncio.wrap_future(look)) is not None:
            apply(*found)
        try:
            async with asyncio.timeout(LOOK_S):
                await hurry.wait()
        except TimeoutError:
            continue


def describe_keys(config: Section, keys: list[str]) -> str:
    """Describe the keys that were taken over, for logs and the ledger."""
    return "; ".join(f"{key}: {_spell(getattr(config, key))}" for key in keys)


def explain_key(key: str) -> str:
    """Return why this key cannot change while the daemon runs, and what to do."""
    return next((reason for pattern, reason in REASONS if fnmatchcase(key, pattern)), _OTHERWISE)


def find_changes(before: Any, after: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, before, after) for all differences; slaves are compared by name, other lists as one value."""
    if key == "slaves":
        before, after = ({s["name"]: s for s in sections} for sections in (before, after))
        if list(before) != list(after):
            yield key, list(before), list(after)
            return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            yield from find_changes(before.get(name), after.get(name), f"{key}.{name}" if key else name)
    elif before != after:
        yield key, before, after


def _spell(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else "null" if value is None else str(value)
    return text if len(text) <= MOST_VALUE else f"{text[:MOST_VALUE]}…"


def _stamp_of(files: tuple[Path, ...]) -> tuple[FileStamp, ...]:
    return tuple(map(stamp_file, files))
