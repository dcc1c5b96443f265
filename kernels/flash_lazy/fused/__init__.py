"""The Triton kernels: the only part of flash_lazy that imports triton, when a call first asks for them."""
