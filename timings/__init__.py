"""Benchmarks of a step, a cell, a grid and the diagnostics on this machine; not part of the wheel."""
