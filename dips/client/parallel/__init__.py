"""How a rank finds its shard in a model: one small seam, one adapter for each way to train."""
