"""Environment variables of other programs, of which a wrong value would stop a library that does not name them."""

import importlib
import os

from lit_lazy.support.error_messages import explain

HUB = "huggingface_hub.constants"
READ_ON_IMPORT = {"MPLBACKEND": "matplotlib", "HF_HUB_DOWNLOAD_TIMEOUT": HUB, "HF_HUB_ETAG_TIMEOUT": HUB}
"""Variable -> the module that raises on import if it is wrong."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
ITS_NUMBERS = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")


def check_variables() -> None:
    """Raise a one-line ValueError for a wrong value. Imports a module only if its variable is set."""
    for name in READ_ON_IMPORT.keys() & os.environ.keys():
        problem = f"{name}={os.environ[name]!r}: {READ_ON_IMPORT[name]} refuses it"
        with explain(problem, "unset it, or correct it", ValueError):
            importlib.import_module(READ_ON_IMPORT[name])
    read_torchrun_size()


def read_torchrun_size() -> int | None:
    """Number of processes that torchrun started on all machines; None if this process was not started by torchrun.

    Raises a one-line ValueError if another program, or a remainder of one, only claims that it was.
    """
    if (run := os.environ.get(TORCHRUN)) is None:
        return None
    for name in ITS_NUMBERS:
        if not (value := os.environ.get(name, "unset")).isdecimal():
            problem = f"says that torchrun started this process, which sets {name} to a number; it is {value}"
            raise ValueError(f"{TORCHRUN}={run!r}: {problem}; unset it, or start the command by torchrun")
    return int(os.environ["WORLD_SIZE"])
