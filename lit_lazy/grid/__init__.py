"""Ablations and searches: expanded into cells, queued, and executed by workers."""
