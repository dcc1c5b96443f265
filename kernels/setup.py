"""Builds the compiled backend of flash_lazy, one library per instruction set; goes on without it if that fails."""

import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}

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
            sources=sorted(glob("flash_lazy/cpu/*.cpp")),
            depends=sorted(glob("flash_lazy/cpu/*.h")),
            extra_compile_args=[*OPTIONS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in FLAGS.get(platform.machine(), {}).items()
    ],
)
