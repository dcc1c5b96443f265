"""The durable queue of cells, who holds them, and where it is stored."""
