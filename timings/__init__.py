"""Measures what a step, a cell, a grid and the diagnostics cost on this machine; no part of the wheel."""
