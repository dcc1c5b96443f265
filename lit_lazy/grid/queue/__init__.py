"""The durable queue of cells, their holders, and its storage."""
