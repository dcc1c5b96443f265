"""The plan of an ablation, which is stored with its parent run."""

import json
from dataclasses import replace

import pytest

from lit_lazy.config.key import SCHEMA
from lit_lazy.grid.plan import Plan
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast, RowInfo

PLAN = Plan(
    ablation="pair",
    base="backcopy_tiny",
    baseline="lazy",
    command="lit-lazy ablate run pair",
    rows=(RowInfo("lazy", "ours", (0, 1), "backcopy_tiny"), RowInfo("softmax", "ours", (0,), "backcopy_tiny")),
    columns=COLUMNS,
    contrasts=(Contrast("difference", {"lazy": 1.0, "softmax": -1.0}),),
    axes=("normaliser",),
    definitions={"lazy": "a", "softmax": "b"},
    facts={"oracle": 1.5},
    schema=SCHEMA,
    primary=("loss/excess", "loss/bits_per_byte"),
)


def test_it_survives_json() -> None:
    assert Plan.from_json(PLAN.to_json()) == PLAN


def test_a_plan_that_knew_no_primary_outcome_is_read() -> None:
    old = json.loads(PLAN.to_json())
    del old["primary"]
    for column in old["columns"]:
        for name in ("bounds", "by_construction", "margin"):
            del column[name]
    former = Plan.from_json(json.dumps(old))
    assert former.primary == ()
    assert former.columns[0] == replace(COLUMNS[0], margin=None)
    assert PLAN.merge(former, ["softmax", "lazy"]).primary == PLAN.primary


def test_rows_and_seeds_are_joined_in_the_order_of_the_ablation() -> None:
    former = replace(PLAN, rows=(RowInfo("softmax", "ours", (3,), "backcopy_tiny"),))
    rows = PLAN.merge(former, ["softmax", "lazy"]).rows
    assert [(row.variant, row.seeds) for row in rows] == [("softmax", (0, 3)), ("lazy", (0, 1))]


def test_a_row_that_is_another_training_is_refused() -> None:
    former = replace(PLAN, definitions={"lazy": "a", "softmax": "c"})
    with pytest.raises(ValueError, match=r"^row 'softmax': its experiment, ablation, code or data changed since"):
        PLAN.merge(former, ["softmax", "lazy"])


def test_a_grid_of_an_earlier_version_is_refused_in_one_line_and_still_read() -> None:
    old = json.loads(PLAN.to_json())
    del old["schema"]  # plans of schema 1 lack the field
    former = Plan.from_json(json.dumps(old))
    with pytest.raises(ValueError, match=r"^pair on backcopy_tiny: was begun by another version of lit-lazy.*--fresh"):
        PLAN.merge(former, ["softmax", "lazy"])
