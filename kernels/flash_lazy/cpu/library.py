"""The compiled library for this processor: `setup.py` builds one per instruction set, if there is a C++ compiler."""

import ctypes
import hashlib
import os
import platform
from functools import cache
from pathlib import Path

import torch

SWITCH = "FLASH_LAZY_CPU"
"""Environment variable; "0" hides the library, so that `auto` selects what runs without it."""
CAPABILITIES = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}
"""torch's name of an x86-64 processor's capability -> the libraries that it runs, best first."""

FUNCTIONS = {
    "flash_lazy_forward": (4, None),
    "flash_lazy_backward": (3, None),
    "flash_lazy_summarise": (2, None),
    "flash_lazy_decoder_forward": (3, None),
    "flash_lazy_decoder_step": (4, ctypes.c_double),
}
"""Functions of the library: the number of addresses that each takes, and the type of its result."""


def find_obstacle() -> str | None:
    """Why there is no library to run, with the fix; None if there is one."""
    if os.environ.get(SWITCH) == "0":
        return f"the compiled backend is switched off by {SWITCH}=0; unset it"
    return None if get_instruction_set() else _describe_absence()


@cache
def _describe_absence() -> str:
    if any(_find_file(name) and not _is_current(name) for name in _list_candidates()):
        return "the compiled backend was built from other sources; repeat `pip install ./kernels`"
    return (
        "no compiled backend is installed for this processor; install a C++ compiler (g++ or clang++) and repeat "
        "`pip install ./kernels`"
    )


@cache
def get_instruction_set() -> str | None:
    """The instruction set of the library that this processor runs: avx512, avx2 or neon; None without a library."""
    return next((name for name in _list_candidates() if _is_current(name)), None)


def _list_candidates() -> tuple[str, ...]:
    """Instruction sets that this processor runs, best first."""
    if platform.machine() in ("aarch64", "arm64"):
        return ("neon",)
    # torch reads ATEN_CPU_CAPABILITY, which can also select less than the processor has.
    return CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ())


def _is_current(name: str) -> bool:
    """Whether there is a library that was built from the sources beside it, if there are any.

    One of other sources would read what it is passed in another layout.
    """
    path = _find_file(name)
    if path is None:
        return False
    sources = getattr(ctypes.CDLL(str(path)), "flash_lazy_sources", None)
    if sources is None:
        return False
    sources.restype = ctypes.c_char_p
    built, here = sources().decode(), hash_sources()
    return "" in (built, here) or built == here


def hash_sources() -> str:
    """Hash of the C++ files beside this one, as setup.py computes it; empty in a wheel, which has none."""
    files = sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16] if files else ""


def _find_file(name: str) -> Path | None:
    path = Path(__file__).with_name(f"{name}.so")
    return path if path.exists() else None


@cache
def load() -> ctypes.CDLL:
    """The library of `get_instruction_set`. Only to be called without an obstacle."""
    name = get_instruction_set()
    path = None if name is None else _find_file(name)
    if path is None:
        raise RuntimeError(find_obstacle())
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p] * arguments, result
    return library
