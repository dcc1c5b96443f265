"""Provenance of figures: command, date, code, versions and machine."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch


def collect_provenance(module: str) -> dict[str, str]:
    """Command (`module` with this process's arguments), date, commit, versions and machine.

    `source` is a hash of the Python files of this folder and of flash_lazy. Unlike the commit, it also tells edited
    files and copies without git apart.
    """
    made = {
        "command": " ".join([f"python3 -m {module}", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _read_first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "source": _hash_source(Path(__file__).parents[1]),
        "torch": torch.__version__,
        "triton": _find_version("triton"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()} with {os.cpu_count()} CPU cores",
    }
    if torch.cuda.is_available():
        made |= {
            "GPU": torch.cuda.get_device_name(),
            "driver": _read_first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "CUDA": str(torch.version.cuda),
        }
    return made


def _hash_source(kernels: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("bench", "flash_lazy") for path in (kernels / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(kernels)}\n{path.read_text(encoding='utf-8')}\n".encode())
    return digest.hexdigest()[:12]


def _read_first_line(*command: str) -> str:
    """First output line of a command, or "unknown"."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def _find_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"
