"""Files of a daemon: durable, readable by its user only, held by one process, and seen to change; its programs; its
machine.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dips.errors import OF_THE_DISK, ConfigError, FailedDisk

# ---- fsync ----------------------------------------------------------------------------------------------------------


@contextmanager
def named_in_errors(path: object) -> Iterator[None]:
    """Name this file in an OSError of the block that names none: `write` and `fsync` know a descriptor alone."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sync_path(path: Path) -> None:
    """Make a file, or a directory's list of files, durable: a new file is durable only after its directory is
    synced.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, each made durable in its parent; an existing directory is fine."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_path(path.parent)


def make_private_file(path: Path) -> None:
    """Make an empty file that only its owner may read and write, whatever the umask; it replaces one that is there."""
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def name_aside(output: Path) -> Path:
    """Return the path beside `output` where it is written first. Raises IsADirectoryError now, not when all is written,
    if a directory is there.
    """
    if output.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(output))
    return output.with_name(f".unfinished-{output.name}")


@contextmanager
def write_aside(output: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a new file beside `output` to write to and make durable; it is renamed to `output` if the block succeeds.

    Raises FileExistsError at the end if another process has begun the same output since: its file, which is half
    written, stays as it is.
    """
    aside = name_aside(output)
    aside.unlink(missing_ok=True)  # first, since it tells a file in the place of a directory
    make_directory(output.parent)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        yield aside
        if not _is_at(aside, descriptor):
            raise FileExistsError(errno.EEXIST, "another process writes to it, too", str(output))
        aside.rename(output)
        sync_path(output.parent)
    finally:
        if _is_at(aside, descriptor):
            aside.unlink()
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is still the one at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def write_synced(path: Path, content: bytes) -> None:
    """Write a file whose content is durable on return; its name is not, before `sync_path` of its directory."""
    with named_in_errors(path):
        path.write_bytes(content)
    sync_path(path)


def write_durably(path: Path, content: bytes, aside: Path) -> None:
    """Replace a file with new content, written to `aside` in the same directory; durable on return."""
    write_synced(aside, content)
    aside.rename(path)
    sync_path(path.parent)


# ---- outputs --------------------------------------------------------------------------------------------------------
# Files and directories that somebody names to a command.


@contextmanager
def explain_unwritable(output: object) -> Iterator[None]:
    """Raise one sentence about `output` for an OSError of the block: FailedDisk if its disk is full, read-only or
    broken, ConfigError otherwise.
    """
    try:
        yield
    except OSError as error:
        told = f"{output}: cannot be written: {error.strerror or error}"
        if error.errno in OF_THE_DISK:
            raise FailedDisk(told) from error
        raise ConfigError(f"{told}; name another path, or make this one writable") from error


def write_output(path: Path, text: str) -> None:
    """Replace a text file in one step, with its directories. Raises as `explain_unwritable` does."""
    with explain_unwritable(path), write_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


# ---- private files --------------------------------------------------------------------------------------------------
# File permissions: all files of a daemon are readable by its user only: ledger, journal, snapshots, logs, sockets.
#
# The training command and `master.on_version` run with the umask that this process was started with.


PRIVATE_MASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_EVERYBODYS = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 (never written to)
_given = -1  # the umask at the start of this process; -1: it was not changed, as in subprocess


def keep_files_private() -> None:
    """Create new files as 0600 and directories as 0700 from now on; call it once, at the start of a process."""
    global _given
    before = os.umask(PRIVATE_MASK)
    _given = before if _given == -1 else _given


def umask_given() -> int:
    """Return the umask for processes that are not ours, as `subprocess.Popen(umask=…)` takes it."""
    return _given


def make_private_directory(path: Path, key: str) -> None:
    """Make a directory, or remove the permissions of others. Raises ConfigError if it is another user's and
    world-writable, or `/tmp` itself and the like: root would take it from all. A tmpfs of one's own has that mode, too.

    The group keeps its permissions in directories of other users: Kubernetes gives volumes to a group (fsGroup).
    """
    make_directory(path)
    found = path.stat()
    mode = stat.S_IMODE(found.st_mode)
    if mode & stat.S_IWOTH and os.path.realpath(path) in _EVERYBODYS:
        raise ConfigError(f"{key}: {path} is everybody's (mode {mode:o}): name a directory in it")
    if found.st_uid == os.geteuid():
        if mode & _OTHERS:
            path.chmod(mode & ~_OTHERS)
    elif mode & stat.S_IWOTH:
        raise ConfigError(
            f"{key}: everybody on this machine may write in {path} (mode {mode:o}), another user's: chmod o-rwx it"
        )


def require_private(path: Path, key: str) -> None:
    """Raise ConfigError if others can read this secret. The group may: Kubernetes mounts Secrets as 0440 with
    fsGroup.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key}: {path} can be read by everybody on this machine (mode {mode:o}): chmod 600 it")


# ---- pidlock --------------------------------------------------------------------------------------------------------
# The kernel releases the lock when the process dies for any reason; the file stays and has no meaning by itself.


UNKNOWN = "unknown"  # the holder has not written its pid yet
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP}  # of Lustre without `flock`


def lock_file(file: IO[Any], path: Path, how: int) -> None:
    """Lock an open file as `fcntl.flock` does. Raises ConfigError if its file system has no locks, FailedDisk if it has
    none now.
    """
    try:
        fcntl.flock(file, how)
    except OSError as error:
        told = f"{path}: its file system does not lock files ({error.strerror})"
        if error.errno == errno.ENOLCK:  # of NFS, whose lock server may not run yet: tried again, unlike 78
            raise FailedDisk(told) from error
        if error.errno in _NO_LOCKS:
            raise ConfigError(f"{told}: name a directory on another one, or have it mounted with locks") from error
        raise


class PidLock:
    """A lock that is held from construction to `close`."""

    def __init__(self, path: Path, *, busy: str, advice: str) -> None:
        """Take the lock. Raises ConfigError with `busy`, the holder and `advice` if it is held, and if its file system
        has no locks, FailedDisk if it has none now; OSError if it cannot be opened.
        """
        self._path, self._file = path, path.open("a+")
        try:
            lock_file(self._file, path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (OSError, ConfigError, FailedDisk) as error:
            with self._file as held:
                if not isinstance(error, BlockingIOError):
                    raise
                held.seek(0)
                pid = held.read().strip() or UNKNOWN
            raise ConfigError(f"{busy} (pid {pid}): {advice}") from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def is_in_place(self) -> bool:
        """Whether the lock is held, and its file is the one at its path: others find that one."""
        try:
            return not self._file.closed and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):  # of NFS: the file, or its directory, was removed
                raise
            return False

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()


def lock_holder(path: Path) -> str:
    """Return the pid in a held lock file, UNKNOWN if it is not written yet; empty if the lock is not held."""
    try:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or UNKNOWN
    except FileNotFoundError:
        pass  # never taken
    return ""


# ---- programs -------------------------------------------------------------------------------------------------------


def find_program(name: str, role: str = "") -> str:
    """Return the path of the program that a command begins with. Raises ConfigError if it cannot be executed.

    role   names the command in the error, with the space before the program
    """
    if (found := shutil.which(name)) is not None:
        return found
    if os.sep in name and Path(name).exists():
        raise ConfigError(f"{role}{name!r} is no file that may be executed: chmod +x it, or correct its name")
    raise ConfigError(f"{role}{name!r} is not found: correct its name, or the PATH")


# ---- file stamps ----------------------------------------------------------------------------------------------------


FileStamp = tuple[int, int, int]


def stamp_file(path: Path) -> FileStamp:
    """Return a value that changes with the file, with who may read it, and if a link is redirected (a ConfigMap); a
    missing file has a stamp, too.
    """
    try:
        stat = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a NUL
        return 0, 0, 0
    return stat.st_ino, stat.st_ctime_ns, stat.st_size


# ---- machine --------------------------------------------------------------------------------------------------------


def read_boot_id() -> str:
    """Return the name of this machine's life since it was started last."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
