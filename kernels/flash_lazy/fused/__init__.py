"""The Triton kernels: the one room of flash_lazy that imports triton, and only when an operator first runs."""
