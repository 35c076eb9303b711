"""Deals the user's text or tokens into data ranges, and hands a range's tokens to a training script (§4.2 of Di-PS).

    dips data build --output corpus --ranges 4096 --source web=web/*.jsonl.gz --source code=code.npy --seed 1

    from dips.data import DataSet
    data = DataSet("corpus")
    for batch in data.batches(number, sequences=8, length=2048, rank=rank, world=world): ...

Standard library and numpy; dips/client/data.py adapts it to torch and to Hugging Face data sets.
"""

from __future__ import annotations

from dips.data.deal import deal_documents, deal_rows
from dips.data.reader import DataSet

__all__ = ["DataSet", "deal_documents", "deal_rows"]
