"""Whether the accelerator that a benchmark or check was told to run on is here."""

from __future__ import annotations

import argparse
import ctypes
import os
import socket

import torch

CLONE_NEWUTS = 0x04000000
DEVICE = os.environ.get("DIPS_TEST_DEVICE", "cpu")  # on which the clusters of the integration tests train


def add_device(parser: argparse.ArgumentParser) -> None:
    """The word --device."""
    parser.add_argument("--device", default="cpu", help="cpu, or the type of an accelerator: cuda, npu, xpu")


def missing_device(name: str, processes: int = 1) -> str:
    """Why so many processes of one host cannot run there; "" if they can. What is measured needs a device for each;
    what is checked may share one, see `take_device`.
    """
    if name == "cpu":
        return ""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != name:
        return f"no accelerator of type {name} is here: torch {torch.__version__} finds {here.type if here else 'none'}"
    if processes > torch.accelerator.device_count():
        return f"{processes} ranks need as many devices of type {name}, here are {torch.accelerator.device_count()}"
    return ""


def take_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one before any mesh or group is made of it.

    Where ranks must share a device, each becomes a host of its own: NCCL refuses two ranks on one device of one host,
    and takes them for two hosts by their names. So does Di-PS, which is thereby tried over several hosts.
    """
    if name == "cpu":
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > devices:
        _become_host(f"rank{local_rank}")
    torch.accelerator.set_device_index(local_rank % devices)
    return torch.device(name, torch.accelerator.current_device_index())


def _become_host(name: str) -> None:
    """Give this process, which must be root's, a host name of its own; the ranks talk over loopback."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "ranks that share a device need root, to take host names of their own")
    socket.sethostname(name)
    for library in ("GLOO", "NCCL"):
        os.environ[f"{library}_SOCKET_IFNAME"] = "lo"
