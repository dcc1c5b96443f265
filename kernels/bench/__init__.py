"""Measures and compiles flash_lazy; needs torch and triton, and is no part of the distribution."""
