"""The benchmark of single passes, in the interpreter; its times need a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="the fused kernels need triton, which is for Linux")
from bench import cuda, passes
from flash_lazy.fused import launch
from flash_lazy.fused.launch import make_meta

RUNNABLE = [each for each in passes.CANDIDATES if each.kind != "hopper"]


@pytest.mark.parametrize(
    "candidate",
    [pytest.param(each, id=str(each), marks=() if each.kind == "merged" else pytest.mark.long) for each in RUNNABLE],
)
def test_a_candidate_runs_alone_in_its_blocks(candidate, monkeypatch):
    """On one tile."""
    used = []

    def record(kernel, blocks):
        used.append((kernel.__name__, tuple(blocks)))
        return make_meta(kernel, blocks)

    monkeypatch.setattr(cuda, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(launch, "make_meta", record)
    for name, value in (("BATCH", 1), ("HEADS", 1), ("LENGTH", 64)):
        monkeypatch.setattr(passes, name, value)
    with passes.use_candidate(candidate):
        step = passes.make_step(candidate.name, passes.make_call(candidate.width, 8))
        used.clear()
        step()
    assert used == [(f"{candidate.name}_kernel", (*candidate.blocks, candidate.kind != "pointers"))]
