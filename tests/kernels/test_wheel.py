"""The wheel that users install: its files, and that it works with only torch installed."""

from pathlib import Path
from zipfile import ZipFile

import pytest
from torch_alone import ROOT, build_wheel, run_alone

KERNELS = ROOT / "kernels"
SMOKE = """
from pathlib import Path
import flash_lazy, torch
from flash_lazy import lazy_attention
assert Path(flash_lazy.__file__).is_relative_to({site!r}) and flash_lazy.__version__ == "0.1.0"
torch.manual_seed(0)
results = []
for backend in ("reference", "chunked"):
    q, k, v = (torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    leaves = [x.requires_grad_() for x in (q, k, v, torch.ones(2), torch.zeros(2, 5))]
    out = lazy_attention(*leaves, backend=backend)
    results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
for one, other in zip(*results):
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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(KERNELS, tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
def test_it_contains_only_the_package(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names, info = archive.namelist(), "flash_lazy-0.1.0.dist-info"
        package = {str(path.relative_to(KERNELS)) for path in (KERNELS / "flash_lazy").rglob("*.py")}
        package.add("flash_lazy/py.typed")
        assert {name for name in names if not name.startswith(info)} == package
        assert archive.read(f"{info}/licenses/LICENSE") == (KERNELS / "LICENSE").read_bytes()
        required = [line for line in archive.read(f"{info}/METADATA").decode().splitlines() if "Requires-Dist" in line]
    assert [line.split()[1].split(">")[0] for line in required if "extra" not in line] == ["torch", "typing_extensions"]


@pytest.mark.long
def test_it_works_with_only_torch(wheel: Path, torch_site: Path, tmp_path: Path) -> None:
    for path in torch_site.iterdir():
        if path.name not in ("flash_lazy", "lit_lazy"):
            (tmp_path / path.name).symlink_to(path.resolve())
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    run_alone(SMOKE.format(site=str(tmp_path)), tmp_path)
