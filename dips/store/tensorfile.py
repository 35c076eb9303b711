"""safetensors files of fp32 tensors, written and read without a second copy, and fsynced, which the library does not
do.

The format: 8 bytes of header length; a JSON header {name: {dtype, shape, data_offsets}}; the bytes of all tensors, one
behind another. Numbers are little-endian, as are all machines that Di-PS runs on. The meaning of the tensors is not
known here; readers check digests.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dips.errors import CorruptSnapshot
from dips.files import named_in_errors, sync_path

F32 = npt.NDArray[np.float32]
Shapes = Sequence[tuple[str, tuple[int, ...]]]
OnPiece = Callable[[int], None]

MAX_HEADER_BYTES = 100_000_000  # the library's own bound
PIECE_BYTES = 8 << 20  # written, and passed to the disk, at a time
SYNC_BYTES = 1 << 30  # most bytes written and not yet on the disk, so that the last fsync of any file is short
ITEM = 4
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)  # fd, mode, offset, bytes
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PROT_READ, _MAP_SHARED, _MAP_FAILED = mmap.PROT_READ, mmap.MAP_SHARED, ctypes.c_void_p(-1).value
assert sys.byteorder == "little", "parameters are stored as they lie in memory, which must be little-endian"


def reserve_file(path: Path, size: int) -> None:
    """Reserve `size` bytes on the disk for a file that is still to be written; raise OSError if there is no room."""
    with path.open("ab", buffering=0) as file:
        _reserve_space(file, size)


def write_tensors(path: Path, metadata: Mapping[str, str], shapes: Shapes, data: Iterable[F32]) -> None:
    """Write tensors in the order of `shapes`, durably: see `write_behind`."""
    write_behind(path, make_header(metadata, shapes), sum(prod(s) for _, s in shapes), data, lambda _: None)
    sync_path(path)


def write_behind(path: Path, header: bytes, numel: int, data: Iterable[F32], on_piece: OnPiece) -> int:
    """Write the tensors behind a header, and return the file's size; the caller syncs the file.

    data      flat arrays whose `numel` elements, one array behind another, are those of all tensors in order; the next
              one is asked for when the former is with the kernel, so computing it does not delay the disk
    on_piece  called with the bytes of each piece that is with the kernel; its exceptions end the write
    Raises    OSError: a full disk is found before the first byte, where the file system can reserve; space of
              `reserve_file` is used, and the rest of it released
    """
    size = len(header) + ITEM * numel
    with path.open("r+b" if path.exists() else "wb", buffering=0) as file:
        _reserve_space(file, size)
        _write_all(file, memoryview(header))
        for array in data:
            _write_pieces(file, array.view(np.uint8).data, on_piece)
        if file.tell() != size:
            raise ValueError(f"{path}: expected {size} bytes by its shapes, wrote {file.tell()}")
        if os.fstat(file.fileno()).st_size != size:  # to the size that it has it takes milliseconds all the same
            file.truncate(size)
    return size


def map_new(path: Path, metadata: Mapping[str, str], shapes: Shapes) -> F32:
    """Create a file whose tensors are zeros, and map them, one behind another, for writing; raise OSError if full."""
    path.open("wb").close()
    return map_behind(path, make_header(metadata, shapes), sum(prod(shape) for _, shape in shapes))


def map_behind(path: Path, header: bytes, numel: int) -> F32:
    """Map the tensors behind a header for writing, in an existing file; raise OSError if the disk is full."""
    with path.open("r+b", buffering=0) as file:
        _reserve_space(file, len(header) + ITEM * numel)
        _write_all(file, memoryview(header))
        file.truncate(len(header) + ITEM * numel)
    return np.memmap(path, np.float32, "r+", len(header), (numel,)) if numel else np.empty(0, np.float32)


# Maps by the file's device and inode, which no other file has while it is mapped, and the length: all readers of a file
# share one, since a process has 65,530 at most, and its memory and threads need some of them.
_MAPS = weakref.WeakValueDictionary[tuple[int, int, int], Any]()


def map_floats(path: Path, begin: int, numel: int) -> F32:
    """Map the `numel` fp32 numbers at byte `begin` of a file for reading; the map outlives the file's deletion.

    Not by `mmap.mmap`, which keeps a descriptor open for each map, and a version has a map for each of its layers.
    """
    length = begin + ITEM * numel
    with path.open("rb", buffering=0) as file:
        state = os.fstat(file.fileno())
        if state.st_size < length:
            raise CorruptSnapshot(f"{path}: expected at least {length} bytes, it ends earlier")
        mapped = _MAPS.get((state.st_dev, state.st_ino, length))
        if mapped is None:
            mapped = _MAPS[state.st_dev, state.st_ino, length] = _map_file(path, file.fileno(), length)
    array = np.frombuffer(mapped, np.float32, numel, begin)
    array.flags.writeable = False
    return array


def _map_file(path: Path, descriptor: int, length: int) -> Any:
    """Return the first bytes of a file, which are unmapped when nothing refers to them any more."""
    address = _LIBC.mmap(None, length, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), str(path))
    mapped = (ctypes.c_char * length).from_address(address)
    weakref.finalize(mapped, _LIBC.munmap, address, length).atexit = False
    return mapped


class Reader:
    """An open file; every defect raises CorruptSnapshot with the file's name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        try:
            self.metadata, self._entries, self._begin = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def read_into(self, name: str, shape: tuple[int, ...], out: F32) -> None:
        """Fill the flat `out` with the tensor `name`, whose shape must be `shape`."""
        begin, _ = self._tensor_span(name, shape)
        self._file.seek(begin)
        view = out.view(np.uint8).data
        while view:
            count = self._file.readinto(view[:PIECE_BYTES])
            if not count:
                raise CorruptSnapshot(f"{self.path}: ends within tensor {name!r}")
            view = view[count:]

    def _tensor_span(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return where a tensor begins and ends in the file, in bytes."""
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptSnapshot(f"{self.path}: expected a tensor {name!r}, it is missing")
        expected = {"dtype": "F32", "shape": list(shape)}
        begin, end = entry["data_offsets"]
        if {k: entry.get(k) for k in expected} != expected or end - begin != ITEM * prod(shape):
            raise CorruptSnapshot(f"{self.path}: tensor {name!r}: expected {expected}, got {entry}")
        return self._begin + begin, self._begin + end

    def _read_header(self) -> tuple[dict[str, str], dict[str, Any], int]:
        length = int.from_bytes(self._file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CorruptSnapshot(f"{self.path}: expected a header of 2 to {MAX_HEADER_BYTES} bytes, got {length}")
        raw = self._file.read(length)
        try:
            header = json.loads(raw)
            metadata = header.pop("__metadata__", {})
            for entry in header.values():
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end:
                    raise ValueError(f"offsets {begin}, {end}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CorruptSnapshot(f"{self.path}: its header is no safetensors header: {error!r}") from error
        return metadata, header, 8 + length


def make_header(metadata: Mapping[str, str], shapes: Shapes) -> bytes:
    """Return the bytes of a file before its tensors, which lie one behind another in the order of `shapes`."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name, shape in shapes:
        end = at + ITEM * prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format requires that tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def _reserve_space(file: BinaryIO, size: int) -> None:
    """Raise OSError now if the disk is full; file systems without reservation only fail while writing.

    Not by `os.posix_fallocate`: where a file system cannot reserve, as NFS before 4.2, glibc emulates it with a write
    to each block, without an error, so every snapshot would be written twice.
    """
    while _LIBC.fallocate(file.fileno(), 0, 0, size) != 0:
        error = ctypes.get_errno()
        if error in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if error != errno.EINTR:
            raise OSError(error, os.strerror(error), file.name)


def _write_pieces(file: BinaryIO, view: memoryview, on_piece: OnPiece) -> None:
    """Write pieces, and start the write-out of each at once; left to fsync, the disk would idle until the last is
    copied.
    """
    for begin in range(0, len(view), PIECE_BYTES):
        piece, at = view[begin : begin + PIECE_BYTES], file.tell()
        _write_all(file, piece)
        # DONTNEED starts the write-out of dirty pages and does not wait; the library has no other call for it.
        os.posix_fadvise(file.fileno(), at, len(piece), os.POSIX_FADV_DONTNEED)
        if (at + len(piece)) // SYNC_BYTES > at // SYNC_BYTES:
            with named_in_errors(file.name):
                os.fdatasync(file.fileno())
        on_piece(len(piece))


def _write_all(file: BinaryIO, view: memoryview) -> None:
    with named_in_errors(file.name):
        while view:
            view = view[file.write(view) :]
