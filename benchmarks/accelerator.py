"""Whether the accelerator that a benchmark or check was told to run on is here."""

from __future__ import annotations

import argparse

import torch


def add_device(parser: argparse.ArgumentParser) -> None:
    """The word --device."""
    parser.add_argument("--device", default="cpu", help="cpu, or the type of an accelerator: cuda, npu, xpu")


def missing_device(name: str, processes: int = 1) -> str:
    """Why so many processes of one host cannot run there, each on a device of its own; "" if they can."""
    if name == "cpu":
        return ""
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != name:
        return f"no accelerator of type {name} is here: torch {torch.__version__} finds {here.type if here else 'none'}"
    if processes > torch.accelerator.device_count():
        return f"{processes} ranks need as many devices of type {name}, here are {torch.accelerator.device_count()}"
    return ""


def take_device(name: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one before any mesh or group is made of it."""
    if name == "cpu":
        return torch.device("cpu")
    torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    return torch.device(name, torch.accelerator.current_device_index())
