"""Write the parameters that a run of Megatron's example starts from: start_megatron.py OUT.npz EXAMPLE.py."""

from __future__ import annotations

import sys
from pathlib import Path

import megatron_layouts
import numpy as np
import torch
from run_example import load

if __name__ == "__main__":
    megatron_layouts.shim()
    example = load(Path(sys.argv[2]))
    torch.manual_seed(1)
    np.savez(sys.argv[1], **{name: p.detach().numpy() for name, p in example.build().named_parameters()})
