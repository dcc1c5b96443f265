"""Builds the compiled backend of flash_lazy, one library per instruction set; goes on without it if that fails."""

import platform

from setuptools import Extension, setup

X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}

FOLDER = "flash_lazy/cpu"
OPTIONS = ["-std=c++17", "-O3", "-g0", "-fno-math-errno", "-fno-trapping-math", "-pthread"]

setup(
    ext_modules=[
        Extension(
            f"flash_lazy.cpu.{name}",
            sources=[f"{FOLDER}/attention.cpp", f"{FOLDER}/decoder.cpp"],
            depends=[f"{FOLDER}/{header}.h" for header in ("attention", "products", "summary", "threads", "vectors")],
            extra_compile_args=[*OPTIONS, *flags],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in FLAGS.get(platform.machine(), {}).items()
    ]
)
