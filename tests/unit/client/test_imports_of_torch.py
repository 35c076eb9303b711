"""What a rank imports before it knows that it needs it: torch's DTensor and FSDP cost seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_rank_of_a_plain_model_loads_no_dtensor() -> None:
    """Importing OuterLoop, in an interpreter of its own, loads neither torch.distributed.tensor nor FSDP."""
    code = (
        "import sys, dips.client; dips.client.OuterLoop; assert 'torch' in sys.modules; "
        "print([m for m in ('torch.distributed.tensor', 'torch.distributed.fsdp') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3]
    )
    assert done.stdout.strip() == "[]"
