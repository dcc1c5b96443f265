"""The folder that is published for Hugging Face's `kernels`."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import torch
from torch_alone import ROOT

import flash_lazy


def test_a_copy_runs_under_any_name_beside_another_one(tmp_path):
    """As `kernels` loads it: from a path, under an id. It imports nothing of the other one."""
    hub = runpy.run_path(str(ROOT / "kernels" / "release.py"))["build_hub_folder"](tmp_path)
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
