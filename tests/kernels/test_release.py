"""What is published of flash_lazy: the folder for Hugging Face's `kernels`, and wheels for other platforms."""

import runpy
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import torch
from torch_alone import ROOT

release = SimpleNamespace(**runpy.run_path(str(ROOT / "kernels" / "release.py")))

USE = """
import importlib.util, sys, torch
from pathlib import Path

def load(folder, name):
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

folder = Path(sys.argv[1])
assert importlib.util.find_spec("flash_lazy") is None
found = []
for name in ("flash_lazy_first", "flash_lazy_second"):
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 20, 8).requires_grad_() for _ in range(3)]
    out = torch.compile(load(folder, name).lazy_attention, backend="eager")(*leaves, torch.ones(2), torch.zeros(2, 5))
    found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
assert "flash_lazy" not in sys.modules
for one, other in zip(*found):
    assert one.abs().sum() > 0 and torch.equal(one, other)
torch.save([x.detach() for x in found[0]], sys.argv[2])
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return release.build_hub_folder(tmp_path_factory.mktemp("release"))


def test_a_copy_runs_under_any_name_beside_another_one(hub: Path, torch_site: Path, tmp_path: Path) -> None:
    """As `kernels` loads it: from a path, under an id."""
    site = tmp_path / "site"
    site.mkdir()
    for path in torch_site.iterdir():
        if path.name not in ("flash_lazy", "lit_lazy", "timings"):
            (site / path.name).symlink_to(path.resolve())
    saved = tmp_path / "out.pt"
    environment = {"PYTHONPATH": str(site), "PATH": ""}
    command = [sys.executable, "-S", "-P", "-c", USE, str(hub / "build" / "torch-cpu"), str(saved)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from flash_lazy import lazy_attention

    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 20, 8) for _ in range(3)]
    expected = lazy_attention(*leaves, torch.ones(2), torch.zeros(2, 5), backend="reference")
    torch.testing.assert_close(torch.load(saved)[0], expected)


def test_the_hub_folder_has_a_variant_for_each_backend(hub: Path) -> None:
    variants = {path.name for path in (hub / "build").iterdir()}
    assert variants == {"torch-cpu", "torch-cuda"}
    for path in [hub / "torch-ext" / "flash_lazy", *(hub / "build").iterdir()]:
        names = {str(file.relative_to(path)) for file in path.rglob("*.py")}
        assert names == {
            str(file.relative_to(ROOT / "kernels" / "flash_lazy"))
            for file in (ROOT / "kernels" / "flash_lazy").rglob("*.py")
        }


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
