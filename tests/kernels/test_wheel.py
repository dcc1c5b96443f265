"""The wheel that users install: its files, with and without a C++ compiler, and that it works with only torch."""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from kernel_cases import require_library
from torch_alone import ROOT, build_wheel, run_alone

from flash_lazy.cpu import library

KERNELS = ROOT / "kernels"
SMOKE = """
from pathlib import Path
import flash_lazy, torch
from flash_lazy import lazy_attention
assert Path(flash_lazy.__file__).is_relative_to({site!r}) and flash_lazy.__version__ == "0.1.0"
torch.manual_seed(0)
results = []
for backend in ("reference", "chunked", "auto"):
    q, k, v = (torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.ones(2), torch.zeros(2, 5))]
    out = lazy_attention(*leaves, backend=backend)
    results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
assert flash_lazy.resolve_backend("auto", q) == {auto!r}
for one, *others in zip(*results):
    for other in others:
        torch.testing.assert_close(one, other)
    assert one.abs().sum() > 0
try:
    lazy_attention(*leaves, backend="triton")
except ValueError as error:
    assert "which is not installed" in str(error), error
else:
    raise AssertionError("triton is not there")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(KERNELS, tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
def test_it_works_with_only_torch(wheel, torch_site, tmp_path):
    require_library()
    assert wheel.name.startswith("flash_lazy-0.1.0-py3-none-")
    assert not wheel.name.endswith("-any.whl")
    run_smoke_test(wheel, torch_site, tmp_path, "cpu")


def run_smoke_test(wheel, torch_site, folder, auto):
    """Check a wheel beside torch. auto: the backend that it must select on a CPU."""
    for path in torch_site.iterdir():
        if path.name not in ("flash_lazy", "lit_lazy"):
            (folder / path.name).symlink_to(path.resolve())
    with ZipFile(wheel) as archive:
        archive.extractall(folder)
    run_alone(SMOKE.format(site=str(folder), auto=auto), folder)


@pytest.mark.long
def test_without_a_compiler_it_is_installed_without_the_libraries(torch_site, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/none/cc")
    monkeypatch.setenv("CXX", "/none/c++")
    wheel = build_wheel(KERNELS, tmp_path, "*.so")
    with ZipFile(wheel) as archive:
        assert not [file for file in archive.namelist() if file.endswith(".so")]
    (tmp_path / "site").mkdir()
    run_smoke_test(wheel, torch_site, tmp_path / "site", "chunked")


@pytest.mark.long
def test_it_has_no_error_of_memory_or_arithmetic(tmp_path, monkeypatch):
    """test_cpu.py with libraries under gcc's AddressSanitizer and UndefinedBehaviorSanitizer."""
    require_library()
    asan, standard = (
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    )
    if asan == "libasan.so":
        pytest.skip("g++ has no AddressSanitizer here")
    flags = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"
    monkeypatch.setenv("CFLAGS", flags)
    monkeypatch.setenv("LDFLAGS", flags)
    with ZipFile(build_wheel(KERNELS, tmp_path, "*.so")) as archive:
        archive.extractall(tmp_path / "site")
    variables = {
        "PYTHONPATH": str(tmp_path / "site"),
        "LD_PRELOAD": f"{asan} {standard}",  # the latter, so that torch's exceptions find their function
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    }
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "tests/kernels/test_cpu.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_library_of_other_sources_is_not_run(tmp_path):
    """As after a change of the C++ files in an editable installation, before it is installed again."""
    require_library()
    shutil.copytree(Path(library.__file__).parents[1], tmp_path / "flash_lazy")
    name = library.get_instruction_set()
    code = "from flash_lazy.cpu import library; print(library.get_instruction_set(), library.find_obstacle())"

    def ask():
        command = [sys.executable, "-P", "-c", code]
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()

    built = ctypes.CDLL(str(library.load()._name)).flash_lazy_sources
    built.restype = ctypes.c_char_p
    if not built():
        pytest.skip("the library was not built by setup.py, and knows no sources")
    assert ask() == f"{name} None"
    with (tmp_path / "flash_lazy" / "cpu" / "decoder.cpp").open("a") as file:
        file.write("// changed\n")
    assert ask() == "None the compiled backend was built from other sources; repeat `pip install ./kernels`"
