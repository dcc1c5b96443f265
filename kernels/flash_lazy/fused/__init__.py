"""The Triton kernels: the only part of flash_lazy that imports triton, when an operator first runs."""
