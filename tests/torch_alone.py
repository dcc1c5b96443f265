"""Processes with only torch, its requirements and this project: a GPU machine may have nothing else."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def find_requirements(name: str) -> Iterator[str]:
    """A distribution and all its requirements here, except triton, which only some machines have."""
    requirements = distribution(name).requires or ()
    yield name
    for requirement in requirements:
        other = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]
        if "extra ==" not in requirement and other != "triton":
            try:
                yield from find_requirements(other)
            except PackageNotFoundError:
                continue  # for another system or Python version


@pytest.fixture(scope="session")
def torch_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with torch, what torch requires, and this project."""
    ours = {ROOT / "lit_lazy", ROOT / "kernels" / "flash_lazy", ROOT / "timings"}
    return link_packages(tmp_path_factory.mktemp("site"), ours, "torch")


def link_packages(folder: Path, there: set[Path], *names: str) -> Path:
    """Link packages, and distributions with all their requirements, into a folder."""
    for name in {name for whole in names for name in find_requirements(whole)}:
        # As `files` does, but without a path for each of torch's ten thousand.
        tops = {re.split("[/,]", line)[0] for line in (distribution(name).read_text("RECORD") or "").splitlines()}
        there |= {Path(distribution(name).locate_file(top)) for top in tops - {".."}}
    for path in there:
        (folder / path.name).symlink_to(path)
    return folder


def copy_source(source: Path, folder: Path, *left_out: str) -> Path:
    """A copy of a distribution's source without what earlier builds left there."""
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", *left_out)
    return shutil.copytree(source, folder / "source", ignore=ignored)


def build_wheel(source: Path, folder: Path, *left_out: str) -> Path:
    """Build a distribution's wheel from a copy, so it contains no earlier build and leaves none behind."""
    copied = copy_source(source, folder, *left_out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(copied)], check=True)
    (path,) = folder.glob("*.whl")
    return path


def run_alone(code: str, site: Path) -> str:
    """Run code with only these packages and Python's library, and return its standard output."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(site)!r})\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
