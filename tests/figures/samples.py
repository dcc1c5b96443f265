"""Arrays, tables and histories with made-up numbers, to be drawn."""

from copy import copy
from typing import Any

import numpy as np

from lit_lazy.table.build import TableSpec, build_table
from lit_lazy.table.declaration import Declaration
from lit_lazy.table.records import Column, Observation, RowInfo
from lit_lazy.table.results_table import Table

Arrays = dict[str, np.ndarray]
SPARSITIES = ("zero", "small", "block_64", "null")
KINDS = ("no_operation", "broadcast", "neither")
NAMED = ["lazy", "softmax", "softmax + learned bias", "diverged"]
VARIANTS = [*NAMED, *(f"lazy with another part {i:02d}" for i in range(13))]
BASELINE = VARIANTS[5]
EFFECTS = ["lazy", *(f"a-rather-long-variant-{i:02d}" for i in range(1, 17))]
LOSS = Column("loss", "validation loss", "lower", unit="nats")
EFFECT_COLUMNS = (
    LOSS,
    Column("recall", "recall", "higher", digits=1, unit="%", scale=100),
    Column("sparsity", "sparsity"),
)


def make_arrays(layers=2, heads=4, length=64, maps=2, init=True, lengths=()) -> Arrays:
    """Diagnostics of a model, before and after training, at several lengths."""
    rng = np.random.default_rng(0)
    made = {}
    for prefix, n in [("", length), *([("init/", length)] if init else []), *((f"L{n}/", n) for n in lengths)]:
        keys = min(8, n)
        made |= {
            f"{prefix}sink/weight": rng.random((layers, heads, keys)) / 2,
            f"{prefix}sink/share": rng.random((layers, heads, keys)),
            f"{prefix}sink/value_norm": rng.random((layers, heads, keys)),
            **{f"{prefix}sink/{kind}": rng.random((layers, heads)) / 3 for kind in KINDS},
            f"{prefix}sink/value_ratio": 1.3 * rng.random((layers, heads)),
            f"{prefix}sink/stable_rank": 1 + 3 * rng.random((layers, heads)),
            f"{prefix}mass/row": rng.random((layers, heads, n)),
            f"{prefix}mass/first_key": rng.random((layers, heads, n)) / 2,
            **{f"{prefix}sparsity/{name}": rng.random((layers, heads)) for name in SPARSITIES},
            f"{prefix}tau": 1 + rng.normal(size=(layers, heads)),
            f"{prefix}hidden/effective_rank": 30 * rng.random(layers + 1),
            f"{prefix}hidden/max_over_median": 10 + 300 * rng.random(layers + 1),
            f"{prefix}hidden/cosine": rng.random(layers + 1),
            f"{prefix}loss/by_position": 2 + rng.random(n),
            f"{prefix}sample": np.array([16, n, layers]),
        }
    made["watch/step"] = np.array([0, 1, 2, 4, 7])
    made["watch/tau"] = 1 + rng.random((5, layers, heads))
    made["bias/curve"] = rng.normal(size=(layers, heads, length))
    made["bias/alibi_slope"] = rng.random((layers, heads)) / length
    n = min(length, 128)
    weights = np.tril(np.maximum(rng.random((maps, n, n)) - 0.5, 0)) / n
    made["maps/weights"] = weights.astype(np.float16)
    made["maps/heads"] = np.array([(i % layers, i % heads) for i in range(maps)])
    return {key: value if value.dtype.kind == "i" else np.asarray(value, np.float32) for key, value in made.items()}


def tabulate(values: dict[str, Any], columns=(LOSS,), baseline="", **facts: Any) -> Table:
    """A table of rows, by name the metrics of each seed, or the values of the only column."""
    seen, first = [], columns[0].key
    for name, seeds in values.items():
        for seed, metrics in enumerate(seeds):
            metrics = metrics if isinstance(metrics, dict) else {first: metrics}
            seen.append(Observation(name, seed, metrics.pop("status", "complete"), metrics))
    rows = [RowInfo(name, "ours", tuple(range(len(seeds))), "tiny") for name, seeds in values.items()]
    baseline = baseline or next(iter(values))
    return build_table(TableSpec("study", "tiny", baseline, rows, columns, (), "make", **facts), seen)


def make_study(n_seeds=3, variants=VARIANTS, baseline="lazy") -> Table:
    """Losses and sparsities: some variants have no threshold, one has diverged."""
    rng = np.random.default_rng(1)
    values = {}
    for name in variants:
        level, sparsity = 0.025 + 0.003 * rng.normal(), 0.58 + 0.04 * rng.normal()
        values[name] = [
            {
                "loss/excess": 2.5 if name == "diverged" else level + 0.001 * rng.normal(),
                "sparsity/zero": None if name.startswith("softmax") else sparsity + 0.01 * rng.normal(),
            }
            for _ in range(n_seeds)
        ]
    columns = (
        Column("loss/val", "validation loss", "lower", unit="nats"),
        Column("loss/excess", "excess loss", "lower", unit="nats"),
        Column("sparsity/zero", "sparsity", digits=1, unit="%", scale=100),
    )
    return tabulate(values, columns, baseline)


def make_effects(n_seeds=5, **facts: Any) -> Table:
    """Seventeen rows with three metrics, of which one is undefined in a row; one row failed."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(n_seeds, 3))
    values = {}
    for i, name in enumerate(EFFECTS):
        values[name] = []
        for seed in range(n_seeds):
            loss, recall, sparsity = (common[seed] + 0.5 * (i % 3 - 1) * (i > 0) + 0.1 * rng.normal(size=3)).tolist()
            metrics = {"loss": loss, "recall": recall, "sparsity": None if i == 2 else sparsity}
            values[name].append(metrics | {"status": "failed" if i == 4 else "complete"})
    return tabulate(values, EFFECT_COLUMNS, **facts)


def make_trainings(variants=VARIANTS, n_seeds=2) -> dict[str, list[dict[str, list[tuple[int, float]]]]]:
    """Histories of each seed: shares of the first key grow, tau is constant but for softmax, which has none."""
    steps = [0, 1, 2, 4, 100]
    made = {}
    for i, name in enumerate(variants):
        made[name] = []
        for seed in range(n_seeds):
            metrics = {"watch/first_key_weight": [(step, i + step + seed) for step in steps]}
            metrics["watch/first_key_share"] = [(step, 2 * i + seed) for step in steps]
            if not name.startswith("softmax"):
                metrics["watch/tau_layer_0"] = [(step, 1.0 + seed) for step in steps]
                metrics["watch/tau_layer_1"] = [(step, 2.0 + i + seed) for step in steps]
            made[name].append(metrics)
    return made


def make_question(rule: str, rows: dict[str, list[float]], **changes: Any) -> Table:
    """A question with looks at 10, 20, 40 and 80 seeds, on rows that may stop early; `new ...` against `old`."""
    contrasts = {name: {name: 1.0, "old": -1.0} for name in rows if name.startswith("new")}
    given = {"looks": (10, 20, 40, 80), "commit": "abc", "contrasts": contrasts} | changes
    declared = Declaration("New is so.", "R5", "loss", rule=rule, margin=0.1, seeds=tuple(range(80)), **given)
    return tabulate(rows, (Column("loss", "loss", "lower", 3, "nats", scale=1),), "old", declaration=declared)


def override(table: Table, **derived: Any) -> Table:
    """A table with other statistics, or another verdict, than follow from its values."""
    changed = copy(table)
    vars(changed).update(derived)
    return changed


def around(mean: float, sd: float, n: int) -> list[float]:
    """n values of this mean and standard deviation."""
    x = np.tile([-1.0, 1.0], n // 2)
    return (mean + sd * x / x.std(ddof=1)).tolist()
