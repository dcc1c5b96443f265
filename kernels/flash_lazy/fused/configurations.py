"""Block sizes of the Triton kernels, and settings from environment variables; imports only torch.

The values are read at every kernel launch, so tests and benchmarks may patch them.
"""

import os
from typing import NamedTuple

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads the variable as well, so it must be set before the kernels are imported."""
AUTOTUNE = os.environ.get("FLASH_LAZY_AUTOTUNE", "1") != "0" and not INTERPRETED
SKIP_EMPTY_TILES = os.environ.get("FLASH_LAZY_SKIP_EMPTY_TILES", "0") != "0"
"""Whether to skip the products of tiles without a surviving weight; with equal blocks no bit changes.

Off: by it an H200 loses up to 31 % where few tiles are empty, as in trained models (docs/results/kernels/bench.md).
"""
HOPPER = os.environ.get("FLASH_LAZY_HOPPER", "1") != "0"
"""Whether an H100 or H200 takes the forward kernel that is made for it, where that covers a call; it skips no tile."""
HOPPER_DOCUMENTS = os.environ.get("FLASH_LAZY_HOPPER_DOCUMENTS", "0") != "0"
"""Whether calls with packed documents take kernels for Hopper too. Off: no GPU has run that yet."""
HOPPER_BACKWARD = os.environ.get("FLASH_LAZY_HOPPER_BACKWARD", "0") != "0"
"""Whether dq takes a kernel for Hopper, as by HOPPER. Off: no GPU has run that kernel yet."""
MERGED_BACKWARD = os.environ.get("FLASH_LAZY_MERGED_BACKWARD", "0") != "0"
"""Whether the sweep over rows adds dq to float32 sums, so that the sweep over keys needs only numbers per row.

10 products for 11, but no fixed order of additions: results differ from run to run in their last bits.
"""
RESIDENT_PER_PROCESSOR = 2
INTERPRETED_RESIDENT = 3
MAX_WIDTH = 256
"""Maximum head width."""
DECODE_ROWS = 64
"""Maximum query rows per kv head (group times Lq) for decoding, where they share a block and keys are split."""
DECODE_BLOCK = 64
MAX_BLOCK = 256
"""Upper bound of the rows and columns of a tile in every configuration."""


class Blocks(NamedTuple):
    """One configuration of a kernel: tile of m rows by n keys, warps, pipeline stages, and how tiles are loaded."""

    m: int
    n: int
    warps: int
    stages: int
    described: bool = False
    """By tensor descriptors, where a call allows it; otherwise by addresses."""


# By kernel, element size in bytes, and maximum head width. The first of a list is the default: for half precision the
# largest blocks that spill no registers in a loop on sm_90 (docs/results/kernels/compiled.md), except key_gradient.
CONFIGURATIONS: dict[str, dict[int, dict[int, list[Blocks]]]] = {
    "forward": {
        2: {
            64: [Blocks(128, 64, 8, 3), Blocks(128, 64, 4, 2, True), Blocks(64, 64, 4, 3, True), Blocks(64, 64, 4, 3)],
            128: [Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3, True), Blocks(64, 64, 4, 2)],
            256: [Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 2), Blocks(64, 64, 8, 2)],
        },
        4: {
            64: [Blocks(32, 32, 8, 1), Blocks(64, 32, 8, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 32, 8, 1)],
            256: [Blocks(16, 16, 8, 1)],
        },
    },
    "query_gradient": {
        2: {
            64: [
                *(Blocks(64, 32, 4, 3, True), Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 3), Blocks(64, 32, 4, 2)),
                Blocks(128, 64, 8, 3, True),
            ],
            128: [Blocks(64, 32, 4, 3), Blocks(128, 32, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2)],
            256: [Blocks(32, 32, 8, 2), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)],
        },
        4: {
            64: [Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 16, 8, 1)],
            256: [Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)],
        },
    },
    "bias_gradient": {
        2: {128: [Blocks(64, 64, 4, 1), Blocks(64, 64, 8, 1)], 256: [Blocks(32, 32, 4, 1)]},
        4: {64: [Blocks(32, 32, 4, 1)], 128: [Blocks(32, 32, 8, 1)], 256: [Blocks(16, 16, 4, 1)]},
    },
    "key_gradient": {
        2: {
            64: [Blocks(64, 64, 4, 3, True), Blocks(64, 64, 4, 2)],
            128: [Blocks(64, 64, 4, 2, True), Blocks(64, 64, 4, 2)],
            256: [Blocks(32, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 4, 1)],
        },
        4: {
            64: [Blocks(32, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 32, 8, 1)],
            256: [Blocks(16, 16, 8, 1)],
        },
    },
    # The key gradient with dq. One each: tuning would add to dq several times.
    "merged_gradient": {
        2: {64: [Blocks(64, 64, 4, 3, True)], 128: [Blocks(64, 64, 8, 2, True)], 256: [Blocks(32, 32, 8, 1)]},
        4: {64: [Blocks(32, 32, 8, 1)], 128: [Blocks(16, 32, 8, 1)], 256: [Blocks(16, 16, 8, 1)]},
    },
}


def list_choices(kernel: str, q: Tensor) -> list[Blocks]:
    """Configurations of a kernel for q's dtype and width, the default first."""
    lists = CONFIGURATIONS[kernel][q.element_size()]
    return lists[min(width for width in lists if width >= q.shape[3])]
