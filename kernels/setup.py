"""Builds the compiled backend of flash_lazy, one library per instruction set; goes on without it if that fails."""

import hashlib
import os
import platform
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}

PLATFORM = os.environ.get("_PYTHON_HOST_PLATFORM") or platform.machine()
"""What is built for, ending in the processor; Python reads the variable too where it builds for another platform."""

SOURCES, HEADERS = (sorted(glob(f"flash_lazy/cpu/*.{suffix}")) for suffix in ("cpp", "h"))
# As `library.hash_sources` computes it: a library of other sources would read what Python passes in another layout.
DIGEST = hashlib.sha256(b"".join(Path(path).read_bytes() for path in sorted(SOURCES + HEADERS))).hexdigest()[:16]
OPTIONS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-pthread"]


class BuildLibraries(build_ext):
    """The libraries do not use Python's interface, so their names are not those of one version's modules."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"


class BuildWheel(bdist_wheel):
    """A wheel for a platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibraries, "bdist_wheel": BuildWheel},
    ext_modules=[
        Extension(
            f"flash_lazy.cpu.{name}",
            sources=SOURCES,
            depends=HEADERS,
            define_macros=[("FLASH_LAZY_SOURCES", f'"{DIGEST}"')],
            extra_compile_args=[*OPTIONS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in FLAGS.get(PLATFORM.rpartition("-")[2], {}).items()
    ],
)
