"""The loggers in addition to MLflow, by kind; without Lightning, which commands that only start workers do not need."""

from collections.abc import Sequence
from importlib.util import find_spec

KINDS = {"csv": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""The optional package that each logger needs."""


def check_logger_kinds(kinds: Sequence[str], option: str = "--logger") -> None:
    """Raise a one-line ValueError for a logger that is unknown, given twice, or whose package is missing.

    option: the option's name in the message.
    """
    for i, kind in enumerate(kinds):
        if kind not in list(KINDS):  # a list, because a kind may be unhashable
            raise ValueError(f"{option} {kind}: unknown; there are {', '.join(KINDS)}")
        if kind in kinds[:i]:
            raise ValueError(f"{option} {kind}: is given twice; leave one out")
        package = KINDS[kind]
        if package is not None and find_spec(package) is None:
            raise ValueError(f"{option} {kind}: needs the package {package}; pip install 'lit-lazy[{kind}]'")
