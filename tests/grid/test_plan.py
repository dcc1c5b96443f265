"""The plan of an ablation, stored with its parent run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from asked_grid import ask_for_grid
from two_rows import two_rows

from flash_lazy import Backend
from lit_lazy.config.key import SCHEMA, evaluation_key
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.grid.grid_folder import GridFolder
from lit_lazy.grid.grid_table import ALTERNATIVES, add_bounds, make_table_spec, make_yardstick
from lit_lazy.grid.plan import Plan
from lit_lazy.grid.plan_merging import merge, merge_plan
from lit_lazy.grid.work_records import Grid
from lit_lazy.table.build import TableSpec, build_table, parse_table, recompute_statistics
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Contrast, Observation, RowInfo, Yardstick
from lit_lazy.table.render import render_markdown
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RunResult

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


ORDER = ["softmax", "lazy"]
DECLARED = Declaration(
    "A claim.", "R1", "loss/val", {"a": {"lazy": 1.0, "softmax": -1.0}}, "lower", 0.1, (1, 2, 3, 4, 5), digest="a",
    looks=(5,), few_seeds_because="a test",
)  # fmt: skip


def declare(**changes: Any) -> Plan:
    return replace(PLAN, declaration=replace(DECLARED, **changes))


def test_a_declaration_that_changed_or_was_committed_late_is_exploratory_until_it_is_undone() -> None:
    """A later commit does not make up for a beginning without one."""
    begun, now = declare(), declare(digest="b", commit="abc")
    merged = merge(now, begun, ORDER, str).declaration
    assert (merged.commit, merged.changed, len(merged.exploratory)) == ("", True, 2)
    other = merge(replace(now, command="ablate run other.py"), begun, ORDER, str)
    assert other.command == f"{PLAN.command}, then ablate run other.py"  # which declares what is printed
    committed = merge(now, declare(commit="old"), ORDER, str).declaration
    assert (committed.commit, committed.changed) == ("abc", True)
    first = declare(commit="old", seen=True)
    again = merge(declare(digest="c"), merge(declare(digest="b"), first, ORDER, str), ORDER, str)
    kept = Plan.from_json(again.to_json())
    assert (kept.declaration.changed, kept.declaration.commit, kept.declaration.seen) == (True, "", True)
    assert merge(declare(commit="new"), kept, ORDER, str).declaration == first.declaration


def test_a_grid_is_titled_by_the_overrides_that_its_name_lacks() -> None:
    folder, base = Path("runs/pair-backcopy_tiny-init_from=0a1b2c"), "backcopy_tiny-init_from=a\x1b/b.ckpt"
    grid = GridFolder(folder, replace(PLAN, base=base))
    assert grid.title == rf"{folder.name} (backcopy_tiny-init_from=a\x1b/b.ckpt)"
    aside = GridFolder(Path("runs/pair-backcopy_tiny.until-20260101-000000"), PLAN)
    assert aside.title == aside.path.name


def test_a_table_has_the_rows_and_seeds_that_were_asked_for_and_no_baseline_without_them() -> None:
    """Older plans name the baseline without cells, which the table showed as missing beside a complete grid."""
    softmax = replace(PLAN, keys={"softmax": {"0": "a"}})
    spec = make_table_spec(softmax, [], [])
    assert ([*spec.rows], spec.baseline, spec.contrasts) == ([PLAN.rows[1]], "", ())
    assert spec.warnings == [
        "No differences: the baseline, lazy, is not among the rows; run it too, or name another by --baseline."
    ]
    both = make_table_spec(replace(PLAN, keys={"softmax": {"0": "a"}, "lazy": {"1": "b"}}), [], [])
    assert ([row.seeds for row in both.rows], both.baseline, both.warnings) == ([(1,), (0,)], "lazy", [])
    assert build_table(spec, []).compared == []


def test_a_table_names_the_commands_that_asked_for_its_cells() -> None:
    shown = merge(replace(PLAN, command="ablate run pair --verbose"), PLAN, ORDER, str)
    assert shown.command == PLAN.command
    more = replace(PLAN, rows=(replace(PLAN.rows[1], seeds=(1,)),), command="ablate run pair --seeds 1")
    both = f"{PLAN.command}, then ablate run pair --seeds 1"
    joined = merge(more, shown, ORDER, str)
    assert joined.command == merge(PLAN, joined, ORDER, str).command == both
    assert [(row.variant, row.seeds) for row in joined.rows] == [("softmax", (0, 1)), ("lazy", (0, 1))]


def test_an_own_column_that_no_cell_reports_is_named() -> None:
    short = Column("sparsity/block_64", "of longer texts", None), Column("init/mass/non_trigger", "of other data", None)
    own = (*COLUMNS, *short, Column("sink/ratt", "own", "lower", 2))
    observations = [Observation("lazy", seed, "complete", {"sink/rate": 0.5}) for seed in range(2)]
    warnings = make_table_spec(replace(PLAN, columns=own), observations, ["Another."]).warnings
    assert warnings == ["Another.", "Left out, as no cell reports them: 'sink/ratt' (did you mean sink/rate?)."]
    assert make_table_spec(replace(PLAN, columns=own), [], []).warnings == []
    assert make_table_spec(PLAN, observations, []).warnings == []


LR, GONE = "lr=0.00030000000000000003", "was removed from the ablation since this grid began; another name= in"
RENAMED = {"rows": (replace(PLAN.rows[1], variant=LR),), "definitions": {LR: "b"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"definitions": {"lazy": "a", "softmax": "c"}}, "row 'softmax': softmax since this grid began; --changed"),
        (
            {"definitions": {"lazy": "x", "softmax": "c"}},
            "row 'lazy': lazy since this grid began (also changed: 'softm",
        ),
        (RENAMED, f"row '{LR}': {GONE}"),
        ({"schema": SCHEMA - 1}, "pair on backcopy_tiny: was begun by another version of lit-lazy"),
    ],
)
def test_a_row_that_is_another_training_or_has_another_name_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        merge(PLAN, replace(PLAN, **changes), ORDER, str, finished=() if GONE in message else None)


SHOWN = ["lazy", "softmax"]
BEGUN = replace(
    PLAN,
    keys={"lazy": {"0": "k0", "1": "k1"}, "softmax": {"0": "k2"}},
    axis_values={"lazy": {"x": "1"}, "softmax": {"x": "2"}},
)
EDITED = replace(
    BEGUN, definitions={"lazy": "edited", "softmax": "b"}, keys={"lazy": {"0": "n0", "1": "n1"}, "softmax": {"0": "k2"}}
)


def describe(plan: Plan) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """The keys of each row of a plan, its seeds and its note."""
    return {row.variant: (" ".join(plan.keys[row.variant].values()), row.seeds, row.note) for row in plan.rows}


def test_a_changed_row_trains_anew_beside_its_finished_cells() -> None:
    merged = merge(EDITED, BEGUN, SHOWN, lambda _: "its code changed", {"k1", "k2"})
    assert describe(merged) == {
        "lazy": ("n0 n1", (0, 1), ""),
        "lazy (version a)": ("k1", (1,), "before its code changed"),
        "softmax": ("k2", (0,), ""),
    }
    assert merged.axis_values["lazy (version a)"] == {"x": "1"}
    assert make_table_spec(merged, [], []).rows[0].note == "version edited"
    again = merge(EDITED, Plan.from_json(merged.to_json()), SHOWN, str)
    assert again == merged, "killed, it is resumed without the option"
    none = merge(EDITED, BEGUN, SHOWN, str, {"k2"})
    assert list(describe(none)) == SHOWN, "what was not finished is no result"


def test_cells_that_another_row_asks_for_now_are_that_row_s() -> None:
    """One cell in two rows would be twice in the table, and once in MLflow and packs."""
    infos, own = (*EDITED.rows, replace(EDITED.rows[0], variant="new")), EDITED.keys | {"new": {"1": "k1"}}
    now = replace(EDITED, rows=infos, keys=own, definitions=EDITED.definitions | {"new": "a"})
    merged = merge(now, BEGUN, [*SHOWN, "new"], lambda _: "its code changed", {"k0", "k1", "k2"})
    assert merged.keys["lazy (version a)"] == {"0": "k0"}
    assert merged.keys["new"] == {"1": "k1"}
    aside = merge(EDITED, BEGUN, SHOWN, lambda _: "its code changed", {"k1", "k2"})
    later = merge(now, aside, [*SHOWN, "new"], str, {"k1", "k2"})
    assert [row.variant for row in later.rows] == ["lazy", "softmax", "new"], "nothing is left of the former version"


def test_an_edit_that_was_undone_has_its_first_cells_again() -> None:
    edited = merge(EDITED, BEGUN, SHOWN, str, {"k0", "k1", "k2"})
    undone = merge(BEGUN, edited, SHOWN, lambda _: "its code changed", {"k0", "k1", "k2", "n0"})
    assert describe(undone) == {
        "lazy": ("k0 k1", (0, 1), ""),
        "lazy (version edited)": ("n0", (0,), "before its code changed"),
        "softmax": ("k2", (0,), ""),
    }
    assert merge(BEGUN, undone, SHOWN, str) == undone


def test_a_changed_row_that_a_command_does_not_train_is_not_compared_with_rows_that_it_trains() -> None:
    """Its finished cells stay, under another name, which they lose again if the edit is undone."""
    one = replace(EDITED, rows=EDITED.rows[1:], keys={"softmax": {"0": "k2"}}, axis_values={})
    merged = merge(one, BEGUN, SHOWN, lambda _: "its code changed", {"k0", "k1", "k2"})
    aside = {"lazy (version a)": ("k0 k1", (0, 1), "before its code changed")}
    assert describe(merged) == aside | {"softmax": ("k2", (0,), "")}
    assert (make_table_spec(merged, [], []).baseline, merge(one, merged, SHOWN, str)) == ("", merged)
    assert describe(merge(EDITED, merged, SHOWN, str)) == describe(merged) | {"lazy": ("n0 n1", (0, 1), "")}
    assert describe(merge(BEGUN, merged, SHOWN, str)) == describe(BEGUN)


def test_no_row_has_seeds_whose_evaluations_had_other_settings(tmp_path: Path) -> None:
    def ask(sequences: int, *words: str) -> Grid:
        file, shown = tmp_path / f"{sequences}.py", f'common={{"evaluations": (Lengths((1,), {sequences}),)}},'
        source = two_rows("pair", code="from lit_lazy.measure.lengths import Lengths")
        file.write_text(source.replace("rows=(", f"{shown} rows=(", 1))
        return ask_for_grid(["ablate", "run", str(file), "--runs", str(tmp_path), *words])

    begun = ask(8)
    for cell in begun.cells:
        (one,), folder = from_dict(RunConfig, cell.config).evaluations, begun.locate(cell.key)
        metrics, made = {"loss/val": 1.0, "length_1x/loss": 8.0}, ({"git_sha": "abc"}, "data", {}, cell.training_key)
        folder.mkdir(parents=True)
        RunResult(cell.key, cell.config, {}, metrics, {}, {}, *made, {evaluation_key(one): ["length_1x/loss"]}).write(
            folder
        )
        (folder / FINAL_CHECKPOINT).touch()
    (begun.folder / "plan.json").write_text(begun.plan.to_json())
    assert len(merge_plan(ask(4))[1]) == 4, "all are measured anew"
    said = "row 'softmax': its evaluations, also of seeds that this command leaves out, changed since this grid began"
    with pytest.raises(ValueError, match=f"^{said}"):
        merge_plan(ask(4, "--seeds", "0"))
    changed, measurable = merge_plan(ask(4, "--seeds", "0", "--changed"))
    assert {row.seeds: "(version" in row.variant for row in changed.rows} == {(0,): False, (0, 1): True}
    assert len(measurable) == 2


def test_the_marks_of_the_data_become_the_yardstick() -> None:
    for facts in ({}, {"optimum_nats": 1.0}, {"bytes_per_token": 3.0, "trigram_bits_per_byte": 2.5}):
        assert make_table_spec(replace(PLAN, facts=facts), (), ()).yardstick is None
    assert make_yardstick({"optimum_nats": 2.0, "chance_nats": 3.0}) == Yardstick(
        "loss/excess", 0.5, {"optimum": 0.0, "chance": 1.0}
    )
    facts = {"unigram_bits_per_byte": 4.5, "trigram_bits_per_byte": 2.5, "bytes_per_token": 1.0}
    text = make_yardstick(facts)
    assert text == Yardstick("loss/bits_per_byte", pytest.approx(3.5), {"trigram": 2.5, "unigram": 4.5})
    table = build_table(make_table_spec(replace(PLAN, facts=facts), (), ()), [])
    assert replace(table.yardstick, remedy="") == text
    assert table.yardstick.remedy.startswith("--base backcopy_small shows more: Bigram-Backcopy in two seconds a ")
    assert parse_table(json.dumps(table.to_json()), "it") == table


def test_a_table_says_which_cells_may_round_differently() -> None:
    """By the backend, and the version of torch, of the seeds 0 and 1 of `lazy`, and of `softmax`."""
    assert {*get_args(Backend)} - {"auto"} <= {*ALTERNATIVES}
    cpu, torch1, torch2 = {"backend": "cpu"}, {"torch": "1"}, {"torch": "2"}
    chunked, sdpa = {"backend": "chunked"}, {"backend": "sdpa"}
    versions = "backend chunked: softmax; backend cpu: lazy; torch 1: lazy (seed 0); torch 2: lazy (seed 1)"
    for labels, differ, listed in (
        ((cpu, cpu, sdpa), "", ""),
        ((cpu, chunked, sdpa), "backend", "backend chunked: lazy (seed 1); backend cpu: lazy (seed 0)"),
        ((cpu, cpu, chunked), "backend", "backend chunked: softmax; backend cpu: lazy"),
        ((cpu | torch1, cpu | torch2, chunked), "backend and torch", versions),
    ):
        cells = zip(("lazy", "lazy", "softmax"), (0, 1, 0), labels, strict=True)
        observations = [Observation(name, seed, "complete", labels=made) for name, seed, made in cells]
        table = build_table(make_table_spec(PLAN, [], []), observations)
        said = f"Comparable cells differ in {differ}, which may change rounding: {listed}."
        assert [text for text in table.notes if "Comparable" in text] == ([said] if differ else [])


@pytest.mark.parametrize(
    ("starts", "differ"),
    [((None, None), False), ((1.0, 1.0), False), ((1.0, None), True), ((1.0, 0.0), True)],
    ids=["no row has a tau", "one start", "one row has a tau", "two starts"],
)
def test_a_table_says_that_rows_start_at_different_tau_only_if_they_do(starts, differ) -> None:
    observations = [
        Observation(name, seed, "complete", {"init/sparsity/zero": 0.5 + 0.01 * seed * len(name), "init/tau/mean": tau})
        for name, tau in zip(("lazy", "softmax"), starts, strict=True)
        for seed in range(3)
    ]
    rows = tuple(replace(row, seeds=(0, 1, 2)) for row in PLAN.rows)
    table = build_table(make_table_spec(replace(PLAN, rows=rows), observations, ()), observations)
    assert ("rows start at different tau" in render_markdown(table)) == differ
    effect = table.measures["init/sparsity/zero"]["softmax"].difference
    assert effect.test == ("construction" if differ else "t")
    again = recompute_statistics(table, COLUMNS, PLAN.contrasts, PLAN.primary)
    assert again == table, "a table.json alone keeps what its cells said"


def test_a_row_on_other_data_is_held_against_its_own_marks() -> None:
    """It may lack any; the experiment's bound of 0.5 would say that `rare` learned and that `none` did not."""
    facts = {"optimum_nats": 1.0, "chance_nats": 2.0}
    of = {"usual": facts, "rare": facts | {"chance_nats": 1.02}, "none": {"other": 1}}
    cells = [SimpleNamespace(variant=name, facts=known) for name, known in of.items()]
    yardstick = add_bounds(make_yardstick(facts), cells)  # type: ignore[arg-type]
    losses = {"usual": 0.4, "rare": 0.02, "none": 0.9}
    rows = tuple(RowInfo(name, "ours", (0,), "b") for name in losses)
    excess = [column for column in COLUMNS if column.key == "loss/excess"]
    spec = TableSpec("a", "b", "usual", rows, excess, (), "make", yardstick=yardstick)
    table = build_table(spec, [Observation(name, 0, "complete", {"loss/excess": x}) for name, x in losses.items()])
    assert {*table.unlearned} == {"rare"}
    assert "learned below 0.500, rare below 0.010." in render_markdown(table)
    assert parse_table(json.dumps(table.to_json()), "it") == table
