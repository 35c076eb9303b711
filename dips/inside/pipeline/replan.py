"""A new plan for links that have other rates than planned: its search beside training, and its files.

A `PlanReplacement` on each rank follows what rank 0 finds. There a `Replanner` searches: when `PlanWatch`
(dips/inside/planning/adapt.py) wants a new plan, it writes the profile with the measured rates aside, and `dips plan
cluster` runs in a process of its own, since a thread would hold up the steps of all ranks. What is found lies beside
plan and profile as plan.new.yaml and profile.new.yaml (`ask`), or takes their places (`auto`): whole, and the profile
first, so that a plan is never older than its profile. Those of before stay as plan.old.yaml and profile.old.yaml.

Must stay true: one search at a time, which ends after SEARCH_S; no call here waits for it.
"""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import structlog
import yaml

from dips.errors import ConfigError, DipsError
from dips.files import write_aside
from dips.inside.planning.adapt import (
    Adapting,
    Gears,
    PlanChange,
    PlanVerdict,
    PlanWanted,
    PlanWatch,
    TimedTransfer,
    judge_plan,
)
from dips.inside.planning.profile import set_rates

LOOKS = 10  # steps in which ranks look for the file of a new plan before rank 0 says that some have none
SEARCH_S = 600.0  # after which a search is given up: one over a hundred devices takes a minute or two
FOUND = ".found-"  # begins the names of a search's files
NICE = 10  # its priority, below that of the ranks
LOG = structlog.get_logger()


class PlanReplaced(DipsError):
    """The ranks end, so that the next start of the job plays a new plan. It is no failure: a checkpoint may be saved
    before.
    """


class PlanReplacement:
    """A new plan on one rank of a job: what rank 0 has found goes to all with the losses of the next step, and when all
    ranks have the file of one that was taken, and a push was accepted since, they end for it.
    """

    def __init__(
        self, plan: str | os.PathLike[str] | Mapping[str, Any], data: Mapping[str, Any], gears: Gears,
        adapting: Adapting, rank: int,
    ) -> None:  # fmt: skip
        """Begin with the present plan; the search is rank 0's.

        Errors  ConfigError for a plan that is no file, or of unknown origin
        """
        if isinstance(plan, Mapping):
            raise ConfigError(
                f"plan: expected a file for adapt={adapting}, which writes another beside it, got a mapping"
            )
        self._path, self._rank = Path(plan), rank
        self._replanner = None if rank else Replanner(self._path, data, gears, adapting)
        self._found: PlanChange | None = None  # after this step; on rank 0
        self._pushes: int | None = None  # accepted when all ranks had the new plan's file; None: not all have it
        self._looked = 0  # steps in which they looked for it
        self.change: PlanChange | None = None
        """The last plan that was found to be better, and why; None before the first."""

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have the file of a plan that was taken."""
        return self._pushes is not None

    @property
    def _awaits_file(self) -> bool:
        return self.change is not None and self.change.verdict is PlanVerdict.ADOPTED and not self.is_whole

    def take_transfers(self, transfers: Sequence[TimedTransfer], now: float) -> None:
        """Record the transfers of a step, on rank 0."""
        if self._replanner is not None:
            self._found = self._replanner.take_transfers(transfers, now)

    def tell(self) -> dict[str, Any]:
        """Return what this rank tells the others after a step."""
        told: dict[str, Any] = {"plan": None if self._found is None else asdict(self._found)}
        return told | ({"file": digest_plan(self._path)} if self._awaits_file else {})

    def follow(self, ranks: Sequence[Mapping[str, Any]], accepted_pushes: int) -> str:
        """Follow what all ranks have told; return why there is another plan, or "" if there is none."""
        if self._awaits_file:
            self._compare_files([of["file"] for of in ranks], accepted_pushes)
        if (plan := ranks[0]["plan"]) is None:
            return ""
        self.change = PlanChange(**{**plan, "verdict": PlanVerdict(plan["verdict"]), "link": tuple(plan["link"])})
        return str(self.change)

    def _compare_files(self, digests: Sequence[str], accepted_pushes: int) -> None:
        """Begin to wait for a push, if all ranks have the plan that rank 0 has written; say once who has not."""
        lacking = [rank for rank, digest in enumerate(digests) if digest != digests[0] or not digest]
        self._looked += 1
        if not lacking:
            self._pushes = accepted_pushes
        elif self._looked == LOOKS and not self._rank:
            why = f"ranks {lacking} do not have rank 0's {self._path}: copy it to their hosts; they go on until then"
            LOG.warning("new_plan_not_shared", why=why)

    def say_why_over(self, accepted_pushes: int) -> str:
        """Return why the ranks end now for the new plan; "" while they do not."""
        if self._pushes is None or accepted_pushes <= self._pushes:
            return ""
        return f"a push was accepted, and {self._path} is another plan now: start the ranks anew"

    def close(self) -> None:
        """End a search that goes on. Idempotent."""
        if self._replanner is not None:
            self._replanner.close()


class Replanner:
    """Searches for new plans, one at a time, and puts what is better beside the plan or in its place."""

    def __init__(self, plan: Path, data: Mapping[str, Any], gears: Gears, adapting: Adapting) -> None:
        """Begin with the present plan.

        plan    its file, and `data` what it holds
        Errors  ConfigError for a plan that does not say which files it was made from, or whose files are gone
        """
        made = data.get("made_from")
        try:
            assert isinstance(made, Mapping)
            profile, model, self._replans = str(made["profile"]), str(made["model"]), int(made["replans"])
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{plan}: made_from: expected profile, model and replans for adapt={adapting}, got {made!r}: plan "
                "again, by `dips plan cluster ... -o`"
            ) from error
        self._plan, self._data, self._adapting = plan, data, adapting
        self._profile, self._model = (plan.parent / name for name in (profile, model))
        for path in (self._profile, self._model):
            if not path.is_file():
                raise ConfigError(f"{plan}: made_from: expected {path}, from which adapt={adapting} plans: not there")
        self._watch = PlanWatch(gears, self._replans) if gears else None  # one stage has no borders
        self._token = secrets.token_hex(4)  # of its files
        self._wanted: PlanWanted | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._begun_s = 0.0
        self._offered = self._done = False

    def take_transfers(self, transfers: Sequence[TimedTransfer], now: float) -> PlanChange | None:
        """Record the transfers of a step; return what becomes of a plan that was found since. Never raises."""
        if self._watch is None or self._done:
            return None
        try:
            if self._wanted is not None:
                return self._look_after_search(now)
            if (wanted := self._watch.take_transfers(transfers)) is not None:
                self._begin_search(wanted, now)
        except (DipsError, OSError) as error:
            LOG.warning("plan_search_failed", why=str(error))
            self._end_search()
        return None

    def close(self) -> None:
        """End a search that goes on. Idempotent."""
        self._end_search()

    # ---- search ------------------------------------------------------------------------------------------------------

    def _begin_search(self, wanted: PlanWanted, now: float) -> None:
        self._wanted, self._begun_s = wanted, now
        slower = f"{wanted.slowdown:.2f} × the planned seconds"
        LOG.info("plan_search", link=" to ".join(wanted.link), takes=slower, windows=wanted.windows)
        self._drop_found()
        profile, plan = map(self._name_found, (self._profile, self._plan))
        _write_yaml(profile, set_rates(_read_yaml(self._profile), wanted.rates, str(self._profile)))
        words = [sys.executable, "-m", "dips.cli", "plan", "cluster", str(profile), str(self._model)]
        words += ["--for", "pipeline", "-o", str(plan)]
        if nice := shutil.which("nice"):
            words = [nice, "-n", str(NICE), *words]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (it is closed with the search)
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors
        )
        weakref.finalize(self, self._process.kill)  # when the rank ends by an exception

    def _look_after_search(self, now: float) -> PlanChange | None:
        assert self._process is not None and self._wanted is not None and self._watch is not None
        code = self._process.poll()
        if code is None:
            if now - self._begun_s > SEARCH_S:
                raise ConfigError(f"the search took more than {SEARCH_S:g} s")
            return None
        if code:
            raise ConfigError(f"dips plan cluster: exit {code}: {self._last_line() or 'it printed nothing'}")
        found = _read_yaml(self._name_found(self._plan))
        change = judge_plan(self._wanted, self._data, found, self._adapting, self._offered)
        self._watch.settle_search()
        if change is not None:
            change = self._put_files(change, found)
            LOG.info("new_plan", verdict=str(change.verdict), why=str(change))
        self._end_search()
        return change

    def _put_files(self, change: PlanChange, found: Mapping[str, Any]) -> PlanChange:
        """Put the new plan and its profile where they belong; return the change with that place."""
        adopted, offered = (change.verdict is of for of in (PlanVerdict.ADOPTED, PlanVerdict.OFFERED))
        for path in (self._profile, self._plan):
            _name_beside(path, "new").unlink(missing_ok=True)
            if adopted:
                shutil.copy2(path, _name_beside(path, "old"))
        if adopted or offered:
            profile, plan = (_name_beside(path, "new") if offered else path for path in (self._profile, self._plan))
            os.replace(self._name_found(self._profile), profile)
            _write_yaml(plan, {**found, "made_from": {**self._data["made_from"], "replans": self._replans + 1}})
            change = replace(change, file=str(plan))
        self._done, self._offered = adopted, offered
        return change

    def _end_search(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._errors is not None:
            self._errors.close()
        self._process = self._errors = self._wanted = None
        self._drop_found()

    def _name_found(self, path: Path) -> Path:
        """The name of a file of the search that goes on: none that one of a killed rank 0, which goes on, writes to."""
        return path.with_name(f"{FOUND}{self._token}-{path.name}")

    def _drop_found(self) -> None:
        """Remove the files of all searches, also of those whose rank 0 was killed."""
        for path in (self._profile, self._plan):
            for left in path.parent.glob(f"*{FOUND}{'?' * 8}-{glob.escape(path.name)}"):
                left.unlink(missing_ok=True)

    def _last_line(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def digest_plan(plan: Path) -> str:
    """Return a digest of a plan's file; "" if it cannot be read."""
    try:
        return hashlib.sha256(plan.read_bytes()).hexdigest()
    except OSError:
        return ""


def _name_beside(path: Path, which: str) -> Path:
    """The name of a file that is offered ("new"), or was replaced ("old")."""
    return path.with_name(f"{path.stem}.{which}{path.suffix}")


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: expected a mapping of keys, got {found!r}")
    return found


def _write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    with write_aside(path) as aside:
        aside.write_text(yaml.safe_dump(dict(content), sort_keys=False))
