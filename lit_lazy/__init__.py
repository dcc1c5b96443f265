"""Reference laboratory for Lazy Attention (Fu et al., arXiv 2601.00919)."""

__version__ = "0.1.0"
