"""Kernels in Gluon for the H100 and H200; a triton without Gluon cannot import them."""

from .common import covers
from .forward import compute_output
from .query_gradient import compute_query_gradient

__all__ = ["compute_output", "compute_query_gradient", "covers"]
