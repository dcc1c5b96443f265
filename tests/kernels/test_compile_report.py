"""Machine code of the Triton kernels for three generations of GPUs, and the cost model; no device is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import compile_report
from flash_lazy.fused import configurations
from flash_lazy.fused.configurations import CONFIGURATIONS

INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
SPILLING = "key_gradient"
"""Its default for widths above 64 spills six words in a loop and is no slower for it on an H200 (passes.md)."""
REPORT = """
import json, sys
from bench.compile_report import Variant, compile_hopper_kernel, report
if __name__ == "__main__":
    hopper, options, asked = json.loads(sys.argv[1])
    variant = Variant(**options)
    print(json.dumps([compile_hopper_kernel(*hopper)._asdict()] if hopper else report(**asked, variant=variant)))
"""


def report(tmp_path, hopper=None, variant=None, **asked):
    """The compiler's report from a separate process, because Triton's interpreter does not compile.

    hopper: arguments of `compile_hopper_kernel`, instead of a report. variant: fields of a Variant.
    """
    return json.loads(run_script(tmp_path, REPORT, json.dumps([hopper, variant or {}, asked])).splitlines()[-1])


def run_script(tmp_path, text, *words):
    """What a script prints in a process without Triton's interpreter."""
    script = tmp_path / "report.py"
    script.write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def check_row(row):
    assert "failed" not in row, row
    assert row["shared"] <= compile_report.SHARED_LIMITS[row["target"]], row
    wide_enough = row["blocks"] is None or min(row["blocks"]["m"], row["blocks"]["n"]) >= 64
    if row["dtype"] != "fp32" and wide_enough and not row["kernel"].startswith("decode"):
        assert INSTRUCTION[row["target"]] in row["instructions"], row


@pytest.fixture(scope="module")
def default_rows(tmp_path_factory):
    return report(tmp_path_factory.mktemp("default"), widths=[128], dtypes=["bf16"])


@pytest.mark.long
def test_default_configurations(default_rows):
    """On every supported triton: `make test-tritons`."""
    assert len(default_rows) == len(compile_report.KERNELS) * len(compile_report.SHARED_LIMITS)
    for row in default_rows:
        check_row(row)


@pytest.mark.long
def test_default_configurations_do_not_spill(default_rows):
    """On the generation and the triton for which they are chosen, but SPILLING."""
    spilling = {
        row["kernel"] for row in default_rows if row["target"] == 90 and compile_report.count_loop_spills(row) > 0
    }
    assert spilling == {SPILLING}


ONE_ROW = """
from bench import compile_report
from flash_lazy.fused.configurations import Blocks
compile_report.BATCH = compile_report.HEADS = compile_report.LENGTH = 1
for name in ("forward", "query_gradient", "key_gradient", "bias_gradient"):
    print(name, compile_report.compile_kernel(name, Blocks(32, 32, 4, 1), 90).registers)
"""


@pytest.mark.long
def test_kernels_compile_for_a_call_of_one_row(tmp_path):
    """Whose sizes are 1, and so constants without a type."""
    assert run_script(tmp_path, ONE_ROW).count("gradient") == 3


@pytest.mark.long
def test_every_configuration(tmp_path):
    """At a width for each list; `python -m bench` compiles all for every target and type."""
    for row in report(tmp_path, widths=[64, 80, 256], every=True, dtypes=["bf16"], targets=[90]):
        check_row(row)
        if row["width"] <= 128 and is_default(row) and (row["kernel"], row["width"]) != (SPILLING, 80):
            assert compile_report.count_loop_spills(row) == 0, row


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 128])
def test_a_renormalised_query_gradient_has_blocks_without_spills(width, tmp_path):
    """Its third accumulator spills with the default blocks, but not with others of the list."""
    chosen = {"widths": [width], "every": True, "dtypes": ["bf16"], "kernels": ["query_gradient"], "targets": [90]}
    spills = [
        compile_report.count_loop_spills(row) for row in report(tmp_path, variant={"renormalise": True}, **chosen)
    ]
    assert 0 in spills, spills


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", compile_report.HOPPER_KERNELS)
def test_a_kernel_for_hopper_compiles_without_a_spill_in_a_loop(name, packed, width, tmp_path):
    (found,) = report(tmp_path, hopper=(name, width, packed))
    assert found["shared"] <= compile_report.SHARED_LIMITS[90]
    assert found["instructions"] == ["wgmma"]
    assert not found["serialised"]
    assert compile_report.count_loop_spills(found) == 0


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 128])
def test_a_merged_backward_fits(width, tmp_path):
    kernels = ["query_gradient", "key_gradient"]
    for row in report(
        tmp_path, variant={"merged": True}, widths=[width], dtypes=["bf16"], kernels=kernels, targets=[90]
    ):
        check_row(row)
        plain_and_near = row["loops"][:2]
        assert not row["serialised"], row
        assert not any(loop["spills"] for loop in plain_and_near), row


def is_default(row):
    """Whether a row has the first blocks of its list."""
    if row["blocks"] is None:
        return True
    lists = CONFIGURATIONS[row["kernel"]][4 if row["dtype"] == "fp32" else 2]
    return lists[min(width for width in lists if width >= row["width"])][0]._asdict() == row["blocks"]


@pytest.mark.parametrize("width", [64, 128])
def test_bytes_are_those_of_the_launched_tensors(width):
    """The formulas of the cost model against the tensors that the launcher passes to the kernels."""
    small = {"tau", "strip", "maxima", "alive_tiles", "partial"}
    for name in compile_report.MOVED:
        tensors = compile_report.collect_launch_arguments(name, torch.bfloat16, width).items()
        sizes = [x.numel() * x.element_size() for key, x in tensors if isinstance(x, torch.Tensor) and key not in small]
        assert sum(sizes) == compile_report.count_moved_bytes(name, width)
    rows, buffers = 4 * 4 * 16 * 4096, compile_report.count_buffer_bytes(width)
    assert buffers["softmax"] / 2 == buffers["by_row"] / 4 == buffers["survivors"] == rows
    blocks = configurations.CONFIGURATIONS["forward"][2][width]
    assert buffers["maxima"] == 4 * 264 * max(-(-4096 // b.n) * b.m for b in blocks)
    assert buffers["alive_tiles"] == 4 * 264 * max(-(-4096 // b.n) for b in blocks)
    assert buffers["strip"] == 4 * 16 * (512 + 512)
    assert buffers["partial"] == 4 * 14 * 16 * 10 * 2 * 64  # 5 pairs of diagonals of 16 heads by 14 programs: 4 waves


def test_the_estimate_reproduces_measured_passes():
    """Of the default blocks at W 512, as compiled.md says."""
    folder = Path(__file__).parents[2] / "docs" / "results" / "kernels"
    measured = {
        row["candidate"]: row["milliseconds"]
        for row in json.loads((folder / "passes.json").read_text())["rows"]
        if row.get("W") == compile_report.REACH
    }
    ratios = {}
    for row in json.loads((folder / "compiled.json").read_text())["rows"]:
        if found := compile_report.estimate_milliseconds(row):
            *blocks, described = row["blocks"].values()
            kind, blocks = "descriptors" if described else "pointers", " ".join(map(str, blocks))
            name = f"{row['kernel']}, D {row['width']}, {kind}, {blocks}"
            ratios[name] = found["all"] / measured[name]
    assert len(ratios) == 6
    assert ratios.pop("key_gradient, D 128, descriptors, 64 64 4 2") == pytest.approx(0.8, abs=0.05)  # it spills
    assert all(0.89 < ratio < 1.11 for ratio in ratios.values()), ratios


def test_only_innermost_product_loops_are_counted():
    listing = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0030*/                   LDL.64 R4, [R1+0x8] ;
        /*0034*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0038*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/              @!P0 BRA 0x20 ;
        /*0050*/                   STL.64 [R1], R2 ;
        /*0060*/               @P1 BRA 0x10 ;
        /*0070*/                   LDL R2, [R1] ;
        /*0080*/               @P1 BRA 0x70 ;
"""
    assert compile_report.product_loops(listing) == [compile_report.Loop(instructions=5, barriers=1, waits=1, spills=1)]
    assert compile_report.product_loops("") == []
