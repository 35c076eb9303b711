"""What agent and rank import before they know that they need it: torch costs seconds, its DTensor and FSDP more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_agent_loads_no_torch_and_a_rank_of_a_plain_model_no_dtensor() -> None:
    """The library is resolved when it is asked for, not before; and OuterLoop, in an interpreter of its own, loads
    neither torch.distributed.tensor nor FSDP.
    """
    code = (
        "import sys, dips.client, dips.client.app; assert 'torch' not in sys.modules; "
        "dips.client.OuterLoop; assert 'torch' in sys.modules; "
        "print([m for m in ('torch.distributed.tensor', 'torch.distributed.fsdp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.strip() == "[]"
