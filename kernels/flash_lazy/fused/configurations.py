"""Block sizes of the Triton kernels, and what the environment sets; torch alone.

The module is read whenever a kernel is launched, so a test or a benchmark may set its values.
"""

import os
from typing import NamedTuple

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton reads it, too, when the kernels are imported: it must be set before."""
AUTOTUNE = os.environ.get("FLASH_LAZY_AUTOTUNE", "1") != "0" and not INTERPRETED
SKIP_EMPTY_TILES = True
"""Whether products of tiles without a surviving weight are left out; the result is the same to the bit."""
RESIDENT_PER_PROCESSOR = 2
INTERPRETED_RESIDENT = 3
WIDEST = 256
"""Largest width of a head."""
DECODE_ROWS = 64
"""Most query rows of one kv head (group times Lq) that are decoded: they share a block, against a split of the keys."""
DECODE_BLOCK = 64
MOST_ROWS = 256
"""At least the rows, and the columns, of a tile of any configuration."""


class Blocks(NamedTuple):
    """One configuration of a kernel."""

    m: int
    n: int
    warps: int
    stages: int


# By kernel, bytes of an element, and the width up to which a list holds. The first of a list is the default: for half
# precision the largest blocks that spill no registers in a loop on sm_90 (docs/results/kernels/compiled.md).
CONFIGURATIONS: dict[str, dict[int, dict[int, list[Blocks]]]] = {
    "forward": {
        2: {
            64: [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 3), Blocks(128, 128, 8, 2)],
            128: [Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 128, 8, 2)],
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
            64: [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 3), Blocks(64, 32, 4, 2)],
            128: [Blocks(64, 32, 4, 3), Blocks(128, 32, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2)],
            256: [Blocks(32, 32, 8, 2), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)],
        },
        4: {
            64: [Blocks(64, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 16, 8, 1)],
            256: [Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)],
        },
    },
    "key_gradient": {
        2: {
            64: [Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 2)],
            128: [Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(32, 64, 8, 2)],
            256: [Blocks(32, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(32, 32, 4, 1)],
        },
        4: {
            64: [Blocks(32, 32, 8, 1), Blocks(32, 32, 4, 1)],
            128: [Blocks(16, 32, 8, 1), Blocks(32, 32, 8, 1)],
            256: [Blocks(16, 16, 8, 1)],
        },
    },
}


def choices(kernel: str, q: Tensor) -> list[Blocks]:
    """The stated list of a kernel for rows like q's."""
    lists = CONFIGURATIONS[kernel][q.element_size()]
    return lists[min(width for width in lists if width >= q.shape[3])]
