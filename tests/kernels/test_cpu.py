"""`cpu`, the compiled backend, against the reference: sizes, layouts, threads, special values, skipping, operators."""

import pytest
import torch
from kernel_cases import (
    THRESHOLDS,
    assert_small_errors,
    draw,
    eager_errors,
    measure_errors,
    pairwise_cover,
    require_library,
    run_named,
)


@pytest.fixture(autouse=True)
def _library():
    require_library()


COVER = pairwise_cover(
    {
        "threshold": THRESHOLDS,
        "sign": [1, -1],
        "renormalise": [False, True],
        "bias_width": [None, 1, 20, 300],
        "slopes": [False, True],
        "window": [None, 1, 17, 140],
        "key_mask": [False, True],
        "layout": ["plain", "decode", "ragged", "packed"],
        "group": [1, 3],
        "kv_heads": [1, 2],
        "length": [1, 7, 63, 129],
        "width": [1, 3, 8, 24, 80, 257],
        "threads": [1, 2, 3],
    }
)


@pytest.mark.parametrize("setting", COVER, ids=str)
def test_equals_reference(setting):
    torch.set_num_threads(setting["threads"])
    drawn = {name: value for name, value in setting.items() if name != "threads"}
    assert_small_errors(lambda seed: errors_of_a_draw(draw(seed, **drawn)), (71, *range(1000, 1004)))


def errors_of_a_draw(case):
    dlse = torch.randn(case.q.shape[:3], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    exact = run_named(case.to(torch.float64), "reference", dlse=dlse)
    rounded = case.to(torch.float32)
    return measure_errors(run_named(rounded, "cpu", dlse=dlse), exact, eager_errors(rounded, exact, dlse=dlse))
