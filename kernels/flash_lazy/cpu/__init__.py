"""Lazy Attention for CPUs in C++, compiled when the package is installed. Needs no PyTorch headers."""
