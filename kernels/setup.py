"""Builds the compiled backend of flash_lazy, one library per instruction set; goes on without it if that fails."""

import platform

from setuptools import Extension, setup

X86 = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
FLAGS = {"x86_64": X86, "AMD64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}

setup(
    ext_modules=[
        Extension(
            f"flash_lazy.cpu.{name}",
            sources=["flash_lazy/cpu/attention.cpp"],
            depends=["flash_lazy/cpu/products.h", "flash_lazy/cpu/vectors.h"],
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-pthread",
                *flags,
            ],
            extra_link_args=["-pthread"],
            language="c++",
            optional=True,
        )
        for name, flags in FLAGS.get(platform.machine(), {}).items()
    ]
)
