"""Reference laboratory for Lazy Attention (Fu et al., arXiv 2601.00919).

`train`, `load`, `show` and `results` are for notebooks and scripts; `lit-lazy --help` is the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lit_lazy.support.streams import turn_off_telemetry

if TYPE_CHECKING:
    from lit_lazy.api import load, results, show, train

__all__ = ["load", "results", "show", "train"]
__version__ = "0.1.0"

turn_off_telemetry()  # before a library that would report is imported: it reads this once


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is (PEP 562): torch, Lightning and MLflow take seconds."""
    if name in __all__:
        return getattr(import_module("lit_lazy.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
