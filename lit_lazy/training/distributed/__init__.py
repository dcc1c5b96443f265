"""Several processes that train one model: their group, the process of a rank, sharded parameters."""
