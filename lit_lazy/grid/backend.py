"""Whether a grid's cells are trained with the compiled backend of CPUs: as the grid began, on whichever machine.

The backends round differently, and a table should not mix them. The plan holds the choice.
"""

import os

from flash_lazy.cpu.library import SWITCH, find_obstacle
from lit_lazy.training.devices import find_missing_backend, select_training_device


def require_compiled_backend(grid: str) -> None:
    """Raise a one-line ValueError if this machine would train cells without the compiled backend."""
    if missing := find_missing_backend():
        raise ValueError(
            f"{grid}: began with the compiled backend and keeps it, but {missing}, or name another --runs folder"
        )


def keeps_another_backend(compiled: bool) -> bool:
    """Whether a grid that began with or without the compiled backend differs in it from trainings of this process."""
    return select_training_device().type == "cpu" and compiled != (find_obstacle() is None)


def hide_compiled_backend() -> None:
    """Let this process and its children run without the compiled backend."""
    os.environ[SWITCH] = "0"


def describe_portable_backend(grid: str) -> str | None:
    """One line on what a grid without the compiled backend lacks on this machine's CPU; None on an accelerator."""
    if select_training_device().type != "cpu":
        return None
    if obstacle := find_obstacle():
        return f"attention runs slower than it could: {obstacle}"
    return (
        f"{grid} began without the compiled backend and keeps doing without it; --fresh starts again with it, another "
        "--runs folder keeps both"
    )
