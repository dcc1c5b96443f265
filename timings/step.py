"""Cost of a training step with lazy attention, compared with PyTorch's softmax attention in the same model.

Forward, loss, backward, clipping and AdamW of a small decoder in float32 on one thread, the same number of tokens at
every length. All variants take turns in one process (softmax, lazy, ..., lazy, softmax), so other load on the machine
affects all alike; the reported ratio is the median over paired rounds. The learning rate is 0, so that every step has
the same weights.

`timings.rules` compares the attention of every normaliser, by its rule and by its fused path, with lazy attention.

Lazy attention is measured in two states, because the entries it can skip depend on the weights: "untrained", where
near-uniform scores meet tau = 1, and "local", the same model with a bias of -distance / 8.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flash_lazy import lazy_attention
from lit_lazy.attention import AttentionCall, AttentionSpec, Elastic, LearnedBias
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.machine import time_in_turns
from timings.measuring import Quartiles, measure_memory_rise, run_in_process
from timings.results import collect_provenance, format_mebibytes, format_provenance, format_row, format_spread, publish
from timings.rules import format_rules_table, measure_rules
from timings.workload import make_training_step, use_one_thread

LENGTHS, RULE_LENGTHS, ROUNDS, TOKENS = (128, 512, 2048), (1024, 4096), 10, 4096
QUICK: Mapping[str, Any] = {"lengths": (64,), "rule_lengths": (32,), "rounds": 2, "tokens": 128}
"""Arguments of a smoke test of seconds; its figures mean nothing."""

VOCABULARY, SEED = 256, 0
SOFTMAX, STATES = "softmax", ("untrained", "local")
LOCAL_REACH = 8.0
"""Keys over which the bias of the state "local" lowers a score by one nat."""
TILE_ROWS, TILE_COLUMNS = 64, (64, 256)
"""Tiles counted as empty or not: those of a typical GPU kernel, and those that `chunked` skips."""
LONGEST = 4096
"""64 tiles of 64 columns: each tile needs its own channel of a head, which has 64."""


def bench_step(
    lengths: Sequence[int] = LENGTHS,
    rule_lengths: Sequence[int] = RULE_LENGTHS,
    rounds: int = ROUNDS,
    tokens: int = TOKENS,
    out: Path | None = None,
    console: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table with `console`, and write `out` (.json) and the table (.md).

    lengths: sequence lengths up to LONGEST, each a divisor of `tokens`, the tokens per step. rule_lengths: lengths at
    which only the attention of every normaliser is timed. rounds: 2 or more paired rounds, after one warm-up round.
    Raises ValueError if the arguments do not fit.
    """
    for length in (*lengths, *rule_lengths):
        if not 2 <= length <= LONGEST or tokens % length:
            raise ValueError(f"lengths has {length}: must be 2 to {LONGEST} and divide the {tokens} tokens of a step")
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: must be 2 or more, or there is no spread")
    with use_one_thread():
        provenance = collect_provenance(out)
        rows = [row for length in lengths for row in _measure(length, rounds, tokens, console)]
        fewer = max(2, rounds // 2)  # many paths take turns
        rules = [row for length in rule_lengths for row in measure_rules(length, fewer, tokens, console)]
        result = {
            **provenance,
            "model": to_dict(_make_config("untrained")) | {"vocabulary": VOCABULARY},
            "tokens": tokens,
            "rounds": rounds,
            "rows": rows,
            "rules": rules,
        }
    publish(result, format_table(result), out, console)
    return result


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    head = [
        "L", "state", "step: lazy / softmax", "softmax (ms)", "lazy (ms)", "softmax (tokens/s)", "lazy (tokens/s)",
        "attention only: lazy / softmax", "entries cut", "mass left",
        *(f"empty tiles {TILE_ROWS}x{columns}" for columns in TILE_COLUMNS), "peak softmax (MiB)", "peak lazy (MiB)",
    ]  # fmt: skip
    lines = [format_row(head), "|---:|:---|" + "---:|" * (len(head) - 2)]
    for row in result["rows"]:
        step, attention = row["step"], row["attention"]
        cells = [
            str(row["length"]),
            row["state"],
            format_spread(step["ratio"]),
            *(f"{1000 * step['seconds'][name]['median']:.0f}" for name in (SOFTMAX, "lazy")),
            *(f"{row['tokens_per_second'][name]:.0f}" for name in (SOFTMAX, "lazy")),
            format_spread(attention["ratio"]),
            f"{row['entries_cut']:.1%}",
            f"{row['mass_left']:.4f}",
            *(f"{row['empty_tiles'][str(columns)]:.1%}" for columns in TILE_COLUMNS),
            *(format_mebibytes(row["peak_bytes"][name]) for name in (SOFTMAX, "lazy")),
        ]
        lines.append(format_row(cells))
    lines += [
        "",
        f"A training step of {result['tokens']} tokens in float32 on {result['environment']['threads']} thread: median "
        f"[quartiles] of {result['rounds']} paired rounds. Peak: resident memory, excluding model and optimiser.",
        "",
        *format_rules_table(result["rules"]),
        format_provenance(result),
    ]
    return "\n".join(lines) + "\n"


def _make_config(variant: str) -> ModelConfig:
    lazy = AttentionSpec(Elastic(tau_init=1.0, threshold="per_query"), LearnedBias())
    attention = AttentionSpec() if variant == SOFTMAX else lazy
    sizes = {"d_model": 256, "n_layers": 4, "n_heads": 4, "d_ff": 704, "tie_embeddings": False}
    return ModelConfig(**sizes, attention=attention, backend="sdpa" if variant == SOFTMAX else "auto")  # type: ignore[arg-type]


def _make_model(variant: str, length: int) -> DecoderLM:
    model = DecoderLM(_make_config(variant), VOCABULARY, length, SEED)
    if variant == "local":
        for attention in model.attentions:
            attention.bias.table.data[:] = -torch.arange(length) / LOCAL_REACH  # type: ignore[union-attr]
    return model


def _make_step(model: DecoderLM) -> Callable[[Tensor], None]:
    """A training step on token ids `[B, L + 1]`."""
    return make_training_step(model, lambda ids: token_nll(model(ids[:, :-1]), ids[:, 1:]).mean(), frozen=True)


def _draw_ids(length: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (tokens // length, length + 1), generator=generator)


def _capture_attention_inputs(model: DecoderLM, ids: Tensor) -> list[AttentionCall]:
    """The call of each layer's normaliser."""
    calls: list[AttentionCall] = []
    hooks = [a.normaliser.register_forward_pre_hook(lambda _, args: calls.append(args[0])) for a in model.attentions]
    with torch.no_grad():
        model(ids[:, :-1])
    for hook in hooks:
        hook.remove()
    return calls


def _make_attention_step(model: DecoderLM, ids: Tensor) -> Callable[[], None]:
    """Forward and backward pass of the first layer's attention, from q, k, v to their gradients."""
    normaliser = model.attentions[0].normaliser
    call = _capture_attention_inputs(model, ids)[0]
    call = call._replace(**{name: getattr(call, name).detach().requires_grad_() for name in "qkv"})
    grad = torch.empty_like(call.v).normal_(generator=torch.Generator().manual_seed(SEED))  # laid out as in the model

    def step() -> None:
        normaliser(call)[0].backward(grad)

    return step


def _measure(length: int, rounds: int, tokens: int, console: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per state of lazy attention."""
    ids = _draw_ids(length, tokens)
    models = {variant: _make_model(variant, length) for variant in (SOFTMAX, *STATES)}
    console(f"L = {length}: {rounds} rounds of training steps")
    steps = time_in_turns({name: partial(_make_step(model), ids) for name, model in models.items()}, rounds)
    console(f"L = {length}: {rounds} rounds of attention only")
    attention = time_in_turns({name: _make_attention_step(model, ids) for name, model in models.items()}, rounds)
    peaks = {variant: _measure_peak(variant, length, tokens) for variant in (SOFTMAX, *STATES)}
    return [
        {
            "length": length,
            "batch": tokens // length,
            "state": state,
            "step": _compare_to_softmax(steps, state),
            "attention": _compare_to_softmax(attention, state),
            "tokens_per_second": {
                name: tokens / statistics.median(steps[variant])
                for name, variant in ((SOFTMAX, SOFTMAX), ("lazy", state))
            },
            **_measure_survival(models[state], ids),
            "peak_bytes": {SOFTMAX: peaks[SOFTMAX], "lazy": peaks[state]},
        }
        for state in STATES
    ]


def _compare_to_softmax(seconds: Mapping[str, Sequence[float]], state: str) -> dict[str, Any]:
    softmax, lazy = seconds[SOFTMAX], seconds[state]
    ratios = [a / b for a, b in zip(lazy, softmax, strict=True)]
    return {
        "rounds": {SOFTMAX: list(softmax), "lazy": list(lazy)},
        "seconds": {SOFTMAX: asdict(Quartiles.of(softmax)), "lazy": asdict(Quartiles.of(lazy))},
        "ratio": asdict(Quartiles.of(ratios)),
    }


def _measure_survival(model: DecoderLM, ids: Tensor) -> dict[str, Any]:
    """Share of visible entries cut, mean row mass and share of tiles without a weight, over all layers.

    Tiles are counted per sequence and head, without those above the diagonal.
    """
    length = ids.shape[1] - 1
    with torch.no_grad():
        stats = model.compute_residual(ids[:, :-1], with_stats=True)[1]
        calls = zip(_capture_attention_inputs(model, ids), model.attentions, strict=True)
        masses = torch.cat([_compute_tile_masses(call, layer.normaliser.tau) for call, layer in calls])  # type: ignore[arg-type]
    rows = stats[0].zeros.numel() // length
    visible = rows * length * (length + 1) // 2 * len(stats)
    starts = torch.arange(masses.shape[-2]) * TILE_ROWS
    empty = {}
    for columns in TILE_COLUMNS:
        wide = _sum_neighbours(masses, -1, columns // min(TILE_COLUMNS))
        reached = torch.arange(wide.shape[-1]) * columns < (starts + TILE_ROWS)[:, None]
        empty[str(columns)] = (wide[..., reached] == 0).double().mean().item()
    return {
        "entries_cut": sum(stat.zeros.double().sum().item() for stat in stats) / visible,
        "mass_left": statistics.mean(stat.mass.double().mean().item() for stat in stats),
        "empty_tiles": empty,
    }


def _compute_tile_masses(call: AttentionCall, tau: Tensor) -> Tensor:
    """Sum of the weights in each tile of TILE_ROWS x min(TILE_COLUMNS), `[B, H, rows, columns]`.

    With values that are one-hot in the tile of their key, attention returns a row's sums over tiles of columns.
    """
    q, k, v, bias = call[:4]
    tile = torch.arange(k.shape[2]) // min(TILE_COLUMNS)
    indicator = nn.functional.one_hot(tile, v.shape[-1]).to(v.dtype).expand(*v.shape[:2], -1, -1)
    by_row = lazy_attention(q, k, indicator, tau, bias.table)[..., : int(tile[-1]) + 1]
    return _sum_neighbours(by_row, -2, TILE_ROWS)


def _sum_neighbours(x: Tensor, dim: int, size: int) -> Tensor:
    """Sums of `size` neighbours along `dim`; the last group may be smaller."""
    return torch.stack([part.sum(dim) for part in x.split(size, dim)], dim)


def _measure_peak(variant: str, length: int, tokens: int) -> int | None:
    """Bytes by which a step raises the resident memory; None except on Linux (glibc)."""
    return run_in_process(__name__, _measure_peak_here, variant, length, tokens)


def _measure_peak_here(variant: str, length: int, tokens: int) -> int:
    ids = _draw_ids(length, tokens)
    model = _make_model(variant, length)
    step = _make_step(model)
    step(ids[:1, :17])  # allocates the optimiser's state and the libraries' buffers
    model.zero_grad()
    return measure_memory_rise(lambda: step(ids))
