"""Software and hardware behind a result."""

import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

MISSING = "not installed"
END = "--end-of-options"
"""Behind it stands what users or files say, which git must not take for an option."""


def collect_environment() -> dict[str, str]:
    """Versions, machine and commit of this process."""
    # The kernels of each instruction set round differently.
    cores = f"{os.cpu_count()} CPU cores ({torch.backends.cpu.get_cpu_capability()})"
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else cores
    return {
        "lit-lazy": find_version("lit-lazy"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": find_version("lightning"),
        "threads": str(torch.get_num_threads()),
        "machine": f"{platform.system()} {platform.machine()} with {device}",
        "git_sha": git_sha(),
    }


@functools.cache
def git_sha() -> str:
    """Short commit of the project's checkout, with `-dirty` if tracked files differ; "unknown" outside a checkout.

    Call it at the start of a process: it is cached, and the checkout may change while the process runs.
    """
    described = _run_git(Path(__file__).parent, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10")
    return "unknown" if described.returncode else described.stdout.strip()


def find_last_commit(file: Path) -> str:
    """The short commit that last changed a file; "" if it has uncommitted changes or is in no checkout."""
    status = _run_git(file.parent, "status", "--porcelain", "--", file.name)
    commit = _run_git(file.parent, "log", "-1", "--format=%h", "--abbrev=10", "--", file.name)
    return "" if status.returncode or status.stdout else commit.stdout.strip()


def is_earlier(commit: str, file: Path, later: str, seconds: float) -> bool:
    """Whether a commit of a file's checkout can be shown to be earlier than something else.

    later: a commit that this has, of any checkout. seconds: its time since the epoch; 0 if unknown.
    """
    later = later.removesuffix("-dirty")
    if _run_git(file.parent, "merge-base", "--is-ancestor", END, commit, later).returncode == 0:
        return True
    made = _run_git(file.parent, "show", "-s", "--format=%ct", END, commit)
    return made.returncode == 0 and int(made.stdout) <= seconds


def read_committed(place: str) -> str:
    """The text of `COMMIT:PATH`, a path from the current folder. Raises a one-line ValueError if there is none."""
    commit, _, path = place.partition(":")
    shown = _run_git(Path(), "show", END, f"{commit}:./{path}")
    if shown.returncode:
        raise ValueError(f"{place!r}: git shows no such file ({shown.stderr.strip()}); give COMMIT:PATH")
    return shown.stdout


def _run_git(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run git in a folder; without git, it fails as git does."""
    command = ["git", "-C", str(folder), *words]
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 1, "", f"git: {error.strerror}")


def find_version(package: str) -> str:
    """The version of an installed package; MISSING if it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING
