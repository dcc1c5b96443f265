"""The Triton kernels as machine code for three generations of GPUs: no device is needed to compile them."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench import compiled
from flash_lazy.fused.configurations import CONFIGURATIONS

INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}
REPORT = """
import json, sys
from bench.compiled import Variant, report
if __name__ == "__main__":
    widths, every, dtypes, renormalise = json.loads(sys.argv[1])
    print(json.dumps(report(widths, every, dtypes, Variant(renormalise=renormalise))))
"""


def report(
    widths: list[int], every: bool, dtypes: list[str], tmp_path, renormalise: bool = False
) -> list[dict[str, Any]]:
    """The compiler's report from a process of its own: where Triton interprets, it does not compile."""
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, str(script), json.dumps([widths, every, dtypes, renormalise])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def must_hold(row: dict[str, Any]) -> None:
    assert "failed" not in row, row
    assert row["shared"] <= compiled.SHARED_LIMITS[row["target"]], row
    wide_enough = row["blocks"] is None or min(row["blocks"]["m"], row["blocks"]["n"]) >= 64
    if row["dtype"] != "fp32" and wide_enough and not row["kernel"].startswith("decode"):
        assert INSTRUCTION[row["target"]] in row["instructions"], row


@pytest.mark.long
def test_default_configurations(tmp_path):
    rows = report([128], False, ["bf16"], tmp_path)
    assert len(rows) == len(compiled.KERNELS) * len(compiled.SHARED_LIMITS)
    for row in rows:
        must_hold(row)
        if row["target"] == 90:  # the generation that the defaults are chosen for
            assert compiled.looped_spills(row) == 0, row


@pytest.mark.long
def test_every_configuration(tmp_path):
    for row in report([64, 80, 256], True, ["bf16", "fp32"], tmp_path):  # a width for each list of configurations
        must_hold(row)
        if row["target"] == 90 and row["dtype"] != "fp32" and row["width"] <= 128 and is_default(row):
            assert compiled.looped_spills(row) == 0, row


@pytest.mark.long
@pytest.mark.parametrize("width", [64, 128])
def test_a_renormalised_query_gradient_need_not_spill(width, tmp_path):
    """Its third accumulator is too much for the default blocks; others of the list hold it."""
    rows = report([width], True, ["bf16"], tmp_path, renormalise=True)
    spills = [compiled.looped_spills(row) for row in rows if (row["kernel"], row["target"]) == ("query_gradient", 90)]
    assert 0 in spills, spills


def is_default(row: dict[str, Any]) -> bool:
    """Whether a row's blocks are the first of their list."""
    if row["blocks"] is None:
        return True
    lists = CONFIGURATIONS[row["kernel"]][4 if row["dtype"] == "fp32" else 2]
    return lists[min(width for width in lists if width >= row["width"])][0]._asdict() == row["blocks"]
