"""Benchmarks and compilation reports for flash_lazy; needs torch and triton, and is not part of the wheel."""
