"""All that Di-PS does on an accelerator, tried on the one here: `python -m tests.integration.check_device cuda`.

Layouts, lazy installs and Megatron on the ranks of one job; whole runs with a master, slaves and an agent, whose every
element is predicted, sharded and replicated, with merges; what a rank costs. A line for each, and exit code 1 if one
failed. Where ranks share a device each is a host of its own (benchmarks/accelerator.py). It takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.accelerator import missing_device
from tests.integration.cluster_harness import TORCHRUN

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
LIMIT_S = 150.0  # of one check
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "torchrun and not slow"]
SCRIPTS = {  # name: ranks, script, its words
    "layouts": (4, "check_layouts.py", ["plain", "ddp", "fsdp", "hsdp", "tp", "tp_fsdp"]),
    "lazy installs": (2, "check_lazy_install.py", ["plain", "ddp", "fsdp"]),
    "megatron": (4, "check_megatron.py", ["dense"]),
}
RUNS = {  # name: a test that plays a run, the layout of its ranks, and which of its tests, if not all
    "a run: FSDP2 beside a plain rank": ("test_constant_model.py", "fsdp", ""),
    "a run: DDP beside a plain rank": ("test_constant_model.py", "ddp", ""),
    "a run with merges, FSDP2": ("test_overlap.py", "fsdp", ""),
    "a run with merges, DDP": ("test_overlap.py", "ddp", ""),
    "EDiT on a mesh": (
        "test_mesh.py",
        "",
        "layer or sgd or nan or by_time or step or checkpoint",
    ),
    "planned pipelines": ("test_pipeline.py", "", "gradients or bf16 or whole or dropout or fits or trained or seen"),
    "offload, by the allocator": ("test_pipeline.py", "", "offload_is or allocator"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="check_device", description=__doc__.split("\n")[0])
    parser.add_argument("device", help="cuda, npu or xpu")
    parser.add_argument("--only", default="", metavar="WORD", help="checks whose name has this word")
    chosen = parser.parse_args()
    if lacks := missing_device(chosen.device):
        print(f"nothing was checked: {lacks}")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory(prefix="dips-device-") as made:
        for name, (ranks, script, words) in SCRIPTS.items():
            if chosen.only in name:
                out = Path(made) / name
                command = [*TORCHRUN, str(ranks), str(HERE / script), str(out), *words, "--device", chosen.device]
                failed += not check(name, command, {}, out)
    for name, (file, layout, tests) in RUNS.items():
        if chosen.only in name:
            settings = {"DIPS_TEST_DEVICE": chosen.device, "DIPS_TEST_LAYOUT": layout}
            failed += not check(name, [sys.executable, *PYTEST, str(HERE / file), "-k", tests], settings, None)
    return 1 if failed else 0


def check(name: str, command: list[str], settings: dict[str, str], out: Path | None) -> bool:
    """Run one check and print what came of it; `out`: where each rank of a script writes what it found."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **settings},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        wrong = done.stdout[-4000:] if done.returncode else describe_wrong(out) if out else ""
    except subprocess.TimeoutExpired as error:
        wrong = f"not within {LIMIT_S:g} s\n{(error.stdout or b'').decode(errors='replace')[-4000:]}"
    print(f"{'FAILED' if wrong else 'right':<8} {time.monotonic() - began:6.1f} s  {name}", flush=True)
    if wrong:
        print("    " + wrong.replace("\n", "\n    "), flush=True)
    return not wrong


def describe_wrong(out: Path) -> str:
    """What some rank found wrong, in whatever case; "" if nothing is, and something was looked at."""
    files = sorted(out.parent.glob(f"{out.name}.*"))
    found = [(file.suffix[1:], json.loads(file.read_text())) for file in files]
    wrong = [f"rank {rank}, {case}: {what}" for rank, of in found for case, what in find_wrong(of)]
    return "\n".join(wrong) if found else "no rank wrote what it found"


def find_wrong(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Each case with what is wrong in it: `wrong` has something in it, or what should hold does not."""
    wrong = list[tuple[str, str]]()
    for case, of in found.items():
        if "wrong" in of:
            wrong += [(case, f"{what}: {names}") for what, names in of["wrong"].items() if names]
        else:
            wrong += [(case, what) for what, holds in of.items() if not holds]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
