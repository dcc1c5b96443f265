"""Reference laboratory for Lazy Attention (Fu et al., arXiv 2601.00919)."""

from lit_lazy.support.telemetry import turn_off

__version__ = "0.1.0"

turn_off()  # before a library that would report is imported: it reads this once
