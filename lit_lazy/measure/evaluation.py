"""Metrics of a model on a validation set: loss, accuracy, first-key weight, mass, sparsity, tau, sizes."""

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_lazy.attention import Attention, AttentionCall
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.schema import Precision
from lit_lazy.config.user_classes import is_users
from lit_lazy.data import IGNORED, Batch, DataConfig, DataSource
from lit_lazy.data.sampler import validation_loader
from lit_lazy.measure.attention_metrics import AttentionMetrics, Ratios, name_groups
from lit_lazy.measure.diagnostics import hook_layers, load_for
from lit_lazy.measure.learned_parameters import collect_learned, describe_learned
from lit_lazy.model.cpu_decoder import compute_hidden
from lit_lazy.model.decoder import DecoderLM, flops_per_token
from lit_lazy.model.loss import head_nll
from lit_lazy.support.checked_fields import Metric, check_value, require
from lit_lazy.support.error_messages import explain, naming, naming_user_errors, short_repr
from lit_lazy.support.names_to_paths import is_metric_name, list_files

VARIED_BATCH = 32
"""Batch size of `Varied`."""
OF_ROWS = ("loss/excess", "loss/bits_per_byte", "accuracy/", "mass/", "sink/first_key_", "sink/fixed_key_weight")
"""How the metrics in `list_metrics_of_rows` begin."""
ELSEWHERE = ("mass/empty_rows", "mass/dead_heads")
"""Metrics of all data that begin like them."""


@torch.no_grad()
def evaluate(model: DecoderLM, source: DataSource, precision: Precision, batch_size: int) -> dict[str, float]:
    """Final metrics on the full validation set, on the model's device, without undefined ones."""
    attention, losses_and_hits = AttentionMetrics(model.attentions, source.row_groups), Ratios()

    def watch(rows: Mapping[str, Tensor], _: int, layer: Attention, call: AttentionCall) -> None:
        if (key := source.watched_key) is not None:
            attention.update_watched_key(layer.normaliser.compute_key_weight(call, key), key, rows)

    def add(name: str, values: Tensor, counted: Tensor) -> None:
        if counted.any():  # undefined otherwise
            losses_and_hits.add(name, values[counted], counted)

    for batch in iter_validation(model, source, batch_size):
        autocast = torch.autocast(model.device.type, torch.bfloat16, enabled=precision == "bf16")
        rows = {group: batch[group] for group in source.row_groups}
        rows = rows or {"all": torch.ones_like(batch["tokens"], dtype=torch.bool)}
        with autocast, hook_layers(model, partial(watch, rows)):
            hidden, stats = compute_hidden(model, batch["tokens"], batch.get("place"), with_stats=True)
            losses = compute_losses(model, hidden, batch)
            logits = model.head(hidden) if "excess" in losses else None
        predicted = batch["targets"] != IGNORED
        add("loss/val", losses["loss"], predicted)
        if logits is not None:
            hit = (logits.argmax(-1) == batch["targets"]).double()
            add("loss/excess", losses["excess"], predicted)
            for group in source.row_groups:
                add(f"loss/excess_{group}", losses["excess"], batch[group] & predicted)
                add(f"accuracy/{group}", hit, batch[group] & predicted)
        attention.update(stats, rows, batch.get("place"))
    measured = losses_and_hits.compute()
    if "bytes_per_token" in source.info:
        measured["loss/bits_per_byte"] = measured["loss/val"] / math.log(2) / float(source.info["bytes_per_token"])
    measured |= attention.compute()
    if source.row_contrast is not None and model.attentions:
        one, other = (measured.get(f"mass/{group}", math.nan) for group in source.row_contrast)  # one may be empty
        if math.isfinite(one - other):
            measured["mass/{}_minus_{}".format(*source.row_contrast)] = one - other
    return measured | describe_learned(collect_learned(model))


def measure_evaluation(evaluation: Evaluation, model: DecoderLM, data: DataConfig) -> dict[str, float]:
    """The finite metrics of an evaluation by name.

    A user's class measures a copy of the model, whose changes reach nothing else, and may return whatever is a number.
    Raises a one-line ValueError that names it if it fails or returns something else.
    """
    if is_users(type(evaluation)):
        with naming(f"evaluations: {type(evaluation).__name__}"), naming_user_errors("measure()"):
            returned: Any = evaluation.measure(copy.deepcopy(model), data)
            require(isinstance(returned, Mapping), "measure()", returned, "must be a dict of numbers by name")
            found = {name: _to_number(name, value) for name, value in returned.items()}
    else:
        found = evaluation.measure(model, data)
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _to_number(name: Any, value: Any) -> float:
    """A metric's value as a number. Raises a one-line ValueError if it is none, or if the name is none."""
    named = isinstance(name, str) and is_metric_name(name)
    require(named, "measure()", name, "MLflow takes no metric of this name")
    problem, fix = f"{name}={short_repr(value)}", "return a number"
    with explain(problem, fix, TypeError, ValueError, ArithmeticError, RuntimeError):
        number = float(value)
    if math.isfinite(number):
        check_value(name, number, Metric)
    return number


def list_metrics_of_rows(source: DataSource) -> set[str]:
    """Names that `evaluate` gives losses, accuracy, mass and weights on a key, on rows that depend on the data."""
    weights = ["first_key_weight", "first_key_share"] + ["fixed_key_weight"] * (source.watched_key is not None)
    groups = name_groups(source.row_groups)
    found = {"loss/val", *(f"mass/{group}" for group in groups)}
    found |= {f"sink/{weight}{suffix}" for weight in weights for suffix in groups.values()}
    if source.row_contrast is not None:
        found.add("mass/{}_minus_{}".format(*source.row_contrast))
    if "bytes_per_token" in source.info:
        found.add("loss/bits_per_byte")
    if "oracle_nll" in source.validation.__getitems__([0]):
        found.add("loss/excess")
        found |= {name + group for name in ("loss/excess_", "accuracy/") for group in source.row_groups}
    return found


def require_measured(key: str, sources: Sequence[DataSource]) -> None:
    """Raise a one-line ValueError for the name of a metric of rows, or of a loss, that none of these data has."""
    found, name = set().union(*map(list_metrics_of_rows, sources)), key.removeprefix("init/")
    if name.startswith(OF_ROWS) and name not in {*found, *ELSEWHERE}:
        kind = name.partition("/")[0]
        there = ", ".join(sorted(one for one in found if one.startswith(f"{kind}/"))) or "none of its kind"
        raise ValueError(f"primary={key!r}: is not measured on {sources[0].name}, which has {there}")


def iter_validation(model: DecoderLM, source: DataSource, batch_size: int) -> Iterator[Batch]:
    """Validation batches on the model's device, with the model in evaluation mode meanwhile."""
    was_training = model.training
    model.eval()
    for batch in validation_loader(source, batch_size):
        yield {name: value.to(model.device) for name, value in batch.items()}
    model.train(was_training)


def compute_losses(model: DecoderLM, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
    """`loss` of each target `[B, L]` in nats and, if the data has an oracle, `excess` over the oracle's loss.

    Both are 0 where there is no target.
    """
    nll = head_nll(hidden, model.head.weight, batch["targets"])
    if "oracle_nll" not in batch:
        return {"loss": nll}
    return {"loss": nll, "excess": (nll - batch["oracle_nll"]).masked_fill(batch["targets"] == IGNORED, 0)}


def compute_size_metrics(model: DecoderLM) -> dict[str, float]:
    """Number of trainable parameters, and training FLOPs per token."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {
        "model/parameters": float(parameters),
        "model/flops_per_token": float(flops_per_token(model, model.context_length)),
    }


@dataclass(frozen=True)
class Varied(Evaluation):
    """Final metrics on the run's data with other values of one field, such as more pairs to recall."""

    field: str
    """Field of the data's settings."""
    values: tuple[int | str, ...]
    """Values of the field, measured one after the other."""

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raises ValueError if the data has no such field or value, or the model cannot read it."""
        fields = sorted(known.name for known in dataclasses.fields(data))  # type: ignore[arg-type]
        lacks = f"data={type(data).__name__} has no such field; give other data (for an ablation: --base), or one of "
        require(self.field in fields, "Varied.field", self.field, lacks + ", ".join(fields))
        for value in self.values:
            self._load_source(model, data, value)

    def files(self) -> list[Path]:
        """Those that a value names as a path, a folder or a pattern, which have a slash, a star or a suffix."""
        paths = [value for value in self.values if isinstance(value, str) and re.search(r"[/*]|\w\.\w", value)]
        return [file for path in paths for file in list_files(path)]

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`pairs_64/loss/val` and so on: every metric of `evaluate`, prefixed with the field and its value."""
        found = {}
        for value in self.values:
            measured = evaluate(model, self._load_source(model, data, value), "fp32", VARIED_BATCH)
            found |= {f"{self.field}_{value}/{name}": x for name, x in measured.items()}
        return found

    def _load_source(self, model: DecoderLM, data: DataConfig, value: int | str) -> DataSource:
        varied = dataclasses.replace(data, **{self.field: value})  # type: ignore[type-var]
        return load_for(model, varied, f"data.{self.field}", value)
