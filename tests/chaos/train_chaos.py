"""A trainer for chaos: one plain rank, no training: every parameter is one constant, named by cluster and base.

    train_chaos.py CLUSTER OUT TOKENS STEP_S [--ranges] [--wild FACTORS] [--die push|pull] [--ranks N]

The constant is a function of the cluster and of the version that it trains on, so the ledger tells what was pushed. It
writes, each a line of JSON and appended, to OUT.seen every version that it installed and its one number, and to
OUT.steps every inner step before it is reported. OUT.release names its release of Di-PS. While OUT.hold exists it takes
no step.

As torchrun does, the process that the agent starts takes no step itself: it forks the rank, and forks it again when it
was killed, which costs milliseconds where a new process would import torch for seconds. With --die the rank's k-th
incarnation kills itself with SIGKILL at the k-th named moment of a push or of a pull (points.py).

With --ranks N torchrun's own agent starts N ranks, and starts all anew when one was killed, at most RESTARTS times;
then it ends, as torchrun does. Its ranks are forked, for the same reason. They die in turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

LAYERS, WIDTH = 6, 48
RESTARTS = 19  # torchrun --max-restarts; a start of torchrun itself takes many seconds where cores are busy
H = 2  # inner steps between pushes
START = 0.5  # every element of v0@r0
CHUNK_BYTES = 4096  # of one message, so that a parameter of this small model is several
SHAPES = {
    f"blocks.{i}.{name}": shape for i in range(LAYERS) for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (5,)))
}
NUMEL = LAYERS * (WIDTH * WIDTH + 5)


def constant(cluster: str, version: int, number: int) -> float:
    """What `cluster` sets every parameter to while it trains on version `version` of round `number`."""
    return zlib.crc32(cluster.encode()) % 100 / 100 - 0.5 + 0.01 * ((7 * version + 3 * number) % 13)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("cluster")
    parser.add_argument("out", type=Path)
    parser.add_argument("tokens", type=int)
    parser.add_argument("step_s", type=float)
    parser.add_argument("--ranges", action="store_true")
    parser.add_argument("--wild", default="", help="factors of the first pushes, with commas: 1e6,nan")
    parser.add_argument("--die", choices=("push", "pull"))
    parser.add_argument("--ranks", type=int, default=1)
    args = parser.parse_args()

    import torch

    from dips.client.agent.launch import PR_SET_PDEATHSIG, set_process_attribute
    from tests.chaos import points

    torch.set_num_threads(1)
    if args.ranks > 1:
        launch_ranks(args)
        return
    launcher = os.getpid()
    for incarnation in itertools.count(1):
        pid = os.fork()
        if pid == 0:
            set_process_attribute(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(incarnation - 1)
            if args.die:
                points.die_at(args.die, incarnation, args.out.with_suffix(".died"))
            rank(args)
            return
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            sys.exit(os.waitstatus_to_exitcode(status))


def launch_ranks(args: argparse.Namespace) -> None:
    """What torchrun does with its words, but for the fork."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=args.ranks, run_id=f"chaos-{os.getpid()}", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", max_restarts=RESTARTS, monitor_interval=0.05, start_method="fork",
    )  # fmt: skip
    try:
        elastic_launch(config, one_of_ranks)(args)
    except ChildFailedError as error:
        sys.exit(f"torchrun gives up: {error.name}")


def one_of_ranks(args: argparse.Namespace) -> None:
    """One incarnation of one rank."""
    import torch.distributed as dist

    from tests.chaos import points

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)  # a program of its own would not have torchrun's handlers
    if args.die:
        points.die_in_turn(args.die, int(os.environ["RANK"]), args.ranks, args.out.with_suffix(".died"))
    dist.init_process_group("gloo")
    rank(args)
    dist.destroy_process_group()


def rank(args: argparse.Namespace) -> None:
    """One incarnation of the rank."""
    import torch
    from torch import nn

    from dips import __version__
    from dips.client import OuterLoop

    args.out.with_suffix(".release").write_text(__version__)

    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ParameterDict() for _ in range(LAYERS))
    for name, shape in SHAPES.items():
        _, block, leaf = name.split(".")
        model.blocks[int(block)][leaf] = nn.Parameter(torch.zeros(shape))

    def number() -> float:
        elements = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        if not bool((elements == elements[0]).all()):
            args.out.with_suffix(".torn").write_text(f"{outer.version}: {elements.min()} to {elements.max()}")
            raise SystemExit("torn")
        return float(elements[0])

    seen = args.out.with_suffix(".seen").open("a", buffering=1)
    steps = args.out.with_suffix(".steps").open("a", buffering=1)
    wild, pushes = [float(factor) for factor in args.wild.split(",") if factor], 0
    hold, last = args.out.with_suffix(".hold"), None
    with OuterLoop(model) as outer:
        ranges = outer.ranges() if args.ranges else iter(int, 1)
        while not outer.finished:
            while hold.exists():
                time.sleep(0.02)
            over = next(ranges, None) is None  # it may push, and pull: then the next step is of another version
            if outer.version != last:
                last = outer.version
                seen.write(json.dumps([str(last), number()]) + "\n")
            if over:
                break
            factor = wild[pushes] if pushes < len(wild) else 1.0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(factor * constant(args.cluster, last.version, last.round))
            if os.environ.get("RANK", "0") == "0":
                steps.write(json.dumps([time.time(), args.tokens]) + "\n")
            outer.step(tokens=args.tokens)
            pushes += outer.inner_steps % H == 0
            time.sleep(args.step_s)


if __name__ == "__main__":
    main()
