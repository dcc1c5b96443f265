"""What is published of flash_lazy: the folder for Hugging Face's `kernels`, and wheels for other platforms."""

import importlib.util
import re
import runpy
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from torch_alone import ROOT

import flash_lazy

release = SimpleNamespace(**runpy.run_path(str(ROOT / "kernels" / "release.py")))


pytestmark = pytest.mark.xdist_group("release")  # one process builds the folder


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.build_hub_folder(tmp_path_factory.mktemp("release"))


def test_a_copy_runs_under_any_name_beside_another_one(hub: Path) -> None:
    """As `kernels` loads it: from a path, under an id. It imports nothing of the other one."""
    folder = hub / "build" / "torch-cpu"
    assert {path.name for path in (hub / "build").iterdir()} == {"torch-cpu", "torch-cuda"}
    for copied in [hub / "torch-ext" / "flash_lazy", *(hub / "build").iterdir()]:
        assert len([*copied.rglob("*.py")]) == len([*Path(flash_lazy.__path__[0]).rglob("*.py")])
    code = "\n".join(path.read_text() for path in folder.rglob("*.py"))
    assert not re.search(r"^\s*(from|import) flash_lazy", code, re.MULTILINE)
    spec = importlib.util.spec_from_file_location("flash_lazy_copy", folder / "__init__.py")
    copy = sys.modules["flash_lazy_copy"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    leaves, found = [torch.randn(1, 2, 20, 8).requires_grad_() for _ in range(3)], []
    for package in (flash_lazy, copy):
        out = torch.compile(package.lazy_attention, backend="eager")(*leaves, torch.ones(2), torch.zeros(2, 5))
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert found[0][0].abs().sum() > 0
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.long
@pytest.mark.parametrize("platform", release.PLATFORMS)
def test_a_wheel_has_the_libraries_of_its_platform(platform: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="`make wheels` installs it in an environment of its own")
    wheel = release.build_wheel(release.build_source(tmp_path), platform, tmp_path)
    arm, mac = release.PLATFORMS[platform].startswith("aarch64"), "macos" in release.PLATFORMS[platform]
    assert wheel.name == f"flash_lazy-0.1.0-py3-none-{platform.replace('-', '_').replace('.', '_')}.whl"
    with ZipFile(wheel) as archive:
        libraries = {Path(name).stem: archive.read(name) for name in archive.namelist() if name.endswith(".so")}
    assert libraries.keys() == ({"neon"} if arm else {"avx2", "avx512"})
    for library in libraries.values():
        assert library[:4] == (b"\xcf\xfa\xed\xfe" if mac else b"\x7fELF")  # Mach-O of 64 bits
        processor = struct.unpack_from("<I", library, 4)[0] if mac else struct.unpack_from("<H", library, 18)[0]
        assert processor == ((0x0100000C if arm else 0x01000007) if mac else (183 if arm else 62))
