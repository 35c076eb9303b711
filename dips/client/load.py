"""Versions in a model that does not train: one from an exported file (dips.load), or each newest one (dips.follow).

All tensors that the run shares are copied and nothing else, or an error is raised and the model is as it was.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from dips.client.parallel.tensors import plain_name
from dips.client.parallel.unshared_buffers import warn_of_missing
from dips.client.version_pull import follow_versions, list_pieces, pulling_name
from dips.config import host_port, is_loopback
from dips.errors import ConfigError, CorruptSnapshot
from dips.ids import VersionId
from dips.printable import join_some
from dips.protocol.manifest import Manifest
from dips.store.tensorfile import F32
from dips.transport.endpoints import PULLERS, Endpoint, credentials_peer, master_peer

Install = Callable[[Mapping[str, torch.Tensor]], object]

# ---- from a file ----------------------------------------------------------------------------------------------------


def load_version(model: nn.Module, file: Path | str) -> str | None:
    """Copy the trainable parameters and shared buffers from a file of `dips export` into a plain module; see
    dips.load.
    """
    path = Path(file)
    try:
        with safe_open(path, framework="pt") as opened:
            names = _match_names(path, model, set(opened.keys()))
            _check_tensors(path, opened, names)
            with torch.no_grad():
                for name, parameter in names.items():
                    parameter.copy_(opened.get_tensor(name))
            warn_of_missing(model, set(opened.keys()), str(path))
            metadata: Mapping[str, str] = opened.metadata() or {}
            return metadata.get("version")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such file; `dips export` writes one") from error
    except OSError as error:
        form = "is a directory; one of `--format hf` is for from_pretrained"
        raise ConfigError(f"{path}: {form if path.is_dir() else f'cannot be read: {error}'}") from error
    except SafetensorError as error:
        raise CorruptSnapshot(f"{path}: is no whole safetensors file: {error}") from error


def _match_names(path: Path | str, model: nn.Module, there: set[str]) -> dict[str, torch.Tensor]:
    """Map each name in the file to its parameter (a tied parameter may have any of its names) or its buffer."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(plain_name(name))
    found: dict[str, torch.Tensor] = {plain_name(name): buffer for name, buffer in model.named_buffers()}
    found = {name: buffer for name, buffer in found.items() if name in there and buffer.dtype.is_floating_point}
    found |= {name: parameter for parameter, names in aliases.items() for name in names if name in there}
    lacking = {p: names[0] for p, names in aliases.items() if not there & set(names)}
    missing = [name for parameter, name in lacking.items() if parameter.requires_grad]
    unknown = sorted(there - found.keys())
    if missing or unknown:
        parts = [f"{what}: {join_some(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ConfigError(f"{path}: is not of this model; {'; '.join(parts)}; frozen parameters are not in a version")
    if lacking and not any(parameter.requires_grad for parameter in aliases):  # a model that is made for inference
        warnings.warn(
            f"{path} does not hold {join_some(list(lacking.values()))}, which stay as the model has them: right for "
            "the base of adapters, wrong for what the run trains",
            stacklevel=4,
        )
    for name, tensor in found.items():
        if isinstance(tensor, DTensor) or tensor.is_meta:
            raise ConfigError(
                f"{name}: expected a whole parameter on this process; load before fully_shard, not on meta"
            )
    return found


def _check_tensors(path: Path, opened: Any, names: Mapping[str, torch.Tensor]) -> None:
    """Check all tensors before the first is copied, so that a model is filled completely or not at all."""
    for name, parameter in names.items():
        told = opened.get_slice(name)
        if told.get_dtype() != "F32" or tuple(told.get_shape()) != tuple(parameter.shape):
            seen = f"{told.get_dtype()} of shape {tuple(told.get_shape())}"
            raise ConfigError(f"{path}: {name}: expected F32 of shape {tuple(parameter.shape)}, got {seen}")
        if not torch.isfinite(opened.get_tensor(name)).all():
            raise CorruptSnapshot(f"{path}: {name}: not all numbers are finite")


# ---- each newest version --------------------------------------------------------------------------------------------


def follow_model(place: nn.Module | Install, master: str, credentials: Path | str | None, name: str) -> ModelFollower:
    """Join the run of `master` and install its newest version; see dips.follow."""
    if credentials is not None:
        peer = credentials_peer(master, Path(credentials), PULLERS, _warn)
    elif is_loopback(host_port(master)[0]):
        peer = master_peer(master, None)
    else:
        raise ConfigError(f"{master}: plain text is allowed on loopback only; give credentials=")
    return ModelFollower(place, peer, name)


def _warn(problem: str) -> None:
    warnings.warn(f"dips.follow: {problem}", stacklevel=2)


class ModelFollower:
    """A model, or another place for parameters, that follows a run; made by dips.follow.

    A thread pulls each new version into host memory (4 bytes per parameter), by updates where the run has them. Only
    `update` touches the model, in the caller's thread: call it where no forward pass runs. Then each pass sees one
    version, whatever arrives meanwhile. Do not call it from two threads at once.

    What must stay true: the array is read by `update` or written by a pull, never both (`_arrived` says which); a
    version that `update` has asked for stays until it is taken, so that fast versions do not starve it.
    """

    def __init__(self, place: nn.Module | Install, master: Endpoint, name: str) -> None:
        """Join and install the newest version. Errors as of dips.follow."""
        self.version: str | None = None  # that the model holds
        self._ended = False  # the run has, and its last version has arrived
        self._place, self._master, self._name = place, master, name
        self._room: F32 = np.empty(0, np.float32)
        self._views: dict[str, torch.Tensor] = {}  # of the array, by name
        self._lock = threading.Condition()
        self._arrived: VersionId | None = None  # whole in the array, which no pull writes
        self._wanted = True  # what arrives next stays until it is taken
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._taken = asyncio.Event()  # of the loop
        self._task = self._loop.create_task(self._follow())
        self._thread = threading.Thread(target=self._run, name="dips-follow", daemon=True)
        self._thread.start()
        atexit.register(self.close)
        try:
            self.update(None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ModelFollower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def finished(self) -> bool:
        """Whether the run has ended and the model holds its last version."""
        with self._lock:
            return self._ended and str(self._arrived) == self.version

    def update(self, timeout_s: float | None = 0.0) -> str:
        """Install the newest version that has arrived; return the name of the version that is installed now.

        timeout_s  wait so long for one that is not installed yet, or for the run's end; None: as long as it takes
        Errors     ConfigError: the run's model is not this one, which is as it was; Denied: the certificate counts no
                   more. While the master or slaves do not answer there is no new version, and no error
        """
        with self._lock:
            self._wanted = True
            self._lock.wait_for(self._has_news, timeout_s)
            if self._failure is not None:
                raise self._failure
            if self._arrived is not None and str(self._arrived) != self.version:
                self._install()
                self.version = str(self._arrived)
            if self._arrived is not None:
                self._wanted = False
                self._call_soon(self._taken.set)
            assert self.version is not None, "the first update waits for the first version"
            return self.version

    def close(self) -> None:
        """Leave the run; the model keeps its version. Idempotent."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._call_soon(self._task.cancel)
            self._thread.join()

    def _has_news(self) -> bool:
        arrived = self._arrived is not None and str(self._arrived) != self.version
        return arrived or self._failure is not None or self._ended

    def _install(self) -> None:
        if not isinstance(self._place, nn.Module):
            self._place(self._views)
            return
        names = _match_names(self._name, self._place, set(self._views))
        for name, tensor in names.items():
            if tensor.shape != self._views[name].shape:
                run, ours = tuple(self._views[name].shape), tuple(tensor.shape)
                raise ConfigError(f"{name}: expected the run's shape {run}, the model's is {ours}")
        with torch.no_grad():
            for name, tensor in names.items():
                tensor.copy_(self._views[name])

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            failure = ConfigError("this follower is closed")
        except BaseException as error:  # noqa: BLE001 (raised by `update`, on the caller's thread)
            failure = error
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            with self._lock:
                self._failure, self._ended = failure, failure is None
                self._lock.notify_all()

    async def _follow(self) -> None:
        name = pulling_name(self._master, self._name)
        await follow_versions(self._master, name, self._make_room, self._take, _warn)

    def _make_room(self, run: str, version: VersionId, manifest: Manifest) -> F32:
        """Return the array, once no `update` reads it."""
        with self._lock:
            self._arrived = None
            if not self._views:
                self._room = np.empty(manifest.numel, np.float32)
                names = [p for layer in manifest.layers for p in layer.parameters]
                flat = iter(list_pieces(manifest, self._room))
                for parameter in names:
                    view = next(flat).array if parameter.numel else np.empty(0, np.float32)
                    self._views[parameter.name] = torch.from_numpy(view).view(parameter.shape)
            return self._room

    async def _take(self, version: VersionId) -> None:
        """Offer a whole version; if it is waited for, keep it until it is installed."""
        with self._lock:
            self._arrived = version
            self._lock.notify_all()
        while self._is_awaited(version):
            self._taken.clear()
            if self._is_awaited(version):
                await self._taken.wait()

    def _is_awaited(self, version: VersionId) -> bool:
        """Read without the lock, which `update` holds while it copies: heartbeats must go on."""
        return self._wanted and str(version) != self.version

    def _call_soon(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)
