"""Builds what is published of flash_lazy: a source distribution, wheels, and a folder for Hugging Face's `kernels`.

`make wheels` runs it beside ziglang, whose clang compiles the CPU libraries for all PLATFORMS on any of these. They
contain C++'s standard library; those of Linux need glibc 2.17 alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
PLATFORMS = {
    "manylinux-2.17-x86_64": "x86_64-linux-gnu.2.17",
    "manylinux-2.17-aarch64": "aarch64-linux-gnu.2.17",
    "macosx-11.0-x86_64": "x86_64-macos.11.0",
    "macosx-11.0-arm64": "aarch64-macos.11.0",
}
"""Platform, as Python names the one that it runs on -> zig's target."""
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"
PACKAGE = "flash_lazy"
NO_SOURCE = shutil.ignore_patterns("__pycache__", "*.so", "*.cpp", "*.h")


def build_source(out: Path) -> Path:
    """The source distribution, in a folder."""
    with TemporaryDirectory() as scratch:
        source = Path(scratch, "source")
        ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*.so", "torch-ext")
        shutil.copytree(HERE, source, ignore=ignored)
        return _build("build_sdist", source, out)


def build_wheel(source: Path, platform: str, out: Path) -> Path:
    """The wheel of a source distribution for a platform, in a folder. Raises RuntimeError if it lacks its libraries."""
    compiler = f"{sys.executable} -m ziglang c++ -target {PLATFORMS[platform]}"
    linker = dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{compiler} -shared")
    with TemporaryDirectory() as scratch:
        shutil.unpack_archive(source, scratch, filter="data")
        (folder,) = Path(scratch).iterdir()
        variables = {"_PYTHON_HOST_PLATFORM": platform, "CC": compiler, "CXX": compiler, **linker}
        wheel = _build("build_wheel", folder, out, **variables)
        if not list(folder.rglob("build/**/*.so")):
            raise RuntimeError(f"{wheel.name} has no compiled library: see the compiler's messages above")
    return wheel


def _build(what: str, source: Path, out: Path, **variables: str) -> Path:
    """What a function of setuptools' builds of a folder, in another folder."""
    before = set(out.iterdir())
    command = [sys.executable, "-c", BUILD.format(what), str(out.resolve())]
    subprocess.run(command, cwd=source, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)
    (built,) = set(out.iterdir()) - before
    return built


def build_hub_folder(out: Path) -> Path:
    """The folder of a kernel on Hugging Face's Hub: a copy of the package for each kind of device, with its metadata.

    It has no compiled library, so on CPUs the package runs the chunked backend.
    """
    general = tomllib.loads((HERE / "build.toml").read_text())["general"]
    folder = out / "hub"
    shutil.copytree(HERE / PACKAGE, folder / "torch-ext" / PACKAGE, ignore=NO_SOURCE)
    for name in ("build.toml", "README.md", "LICENSE"):
        shutil.copy(HERE / name, folder)
    for backend in general["backends"]:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(HERE / PACKAGE, variant, ignore=NO_SOURCE)
        about = {
            "id": f"{PACKAGE}_hub_{backend}",
            "name": general["name"],
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(about, indent=1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="builds flash_lazy's source distribution, wheels and Hub folder")
    parser.add_argument("--out", type=Path, default=Path("dist/kernels"), help="a folder, which is made anew")
    parser.add_argument("--platforms", nargs="*", choices=PLATFORMS, default=list(PLATFORMS), help="all by default")
    options = parser.parse_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    source = build_source(options.out)
    built = [source, *(build_wheel(source, platform, options.out) for platform in options.platforms)]
    for path in (*built, build_hub_folder(options.out)):
        print(path)


if __name__ == "__main__":
    main()
