"""What a training step costs with lazy attention, beside the same model with PyTorch's softmax attention.

Forward, loss, backward, clipping and AdamW of a small decoder in float32 on one thread, the same number of tokens at
every length. All variants live in one process and take turns (softmax, lazy, ..., lazy, softmax), so that whatever
else the machine does falls on all alike; the figure is the median ratio of paired rounds. The learning rate is 0: the
optimiser does its work, and every step finds the same weights.

The attention of every normaliser alone, by its rule and by its fused path, stands beside lazy attention's
(`timings.rules`).

Lazy attention is measured in two states, because what can be skipped depends on where the weights are:
"untrained", where near-uniform scores meet tau = 1, and "local", the same model with a bias of -distance / 8.
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
from lit_lazy.config.schema import ModelConfig, TrainConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.support.timing import Quartiles, measure_memory_rise, run_in_process, time_in_turns
from lit_lazy.training.optimiser import build_parameter_groups
from timings.results import collect_provenance, format_provenance, publish
from timings.rules import format_rules_table, measure_rules

LENGTHS, RULE_LENGTHS, ROUNDS, TOKENS = (128, 512, 2048), (1024, 4096), 10, 4096
QUICK: Mapping[str, Any] = {"lengths": (64,), "rule_lengths": (32,), "rounds": 2, "tokens": 128}
"""Arguments that show in seconds that everything runs; their figures mean nothing."""

VOCABULARY, SEED = 256, 0
SOFTMAX, STATES = "softmax", ("untrained", "local")
LOCAL_REACH = 8.0
"""Keys over which the bias of the state "local" lowers a score by one nat."""
TILE_ROWS, TILE_COLUMNS = 64, (64, 256)
"""Tiles whose emptiness is counted: those of a usual GPU kernel, and as wide as the CPU backend skips."""
LONGEST = 4096
"""Tiles of 64 columns are told apart by the 64 channels of a head."""


def bench_step(
    lengths: Sequence[int] = LENGTHS,
    rule_lengths: Sequence[int] = RULE_LENGTHS,
    rounds: int = ROUNDS,
    tokens: int = TOKENS,
    out: Path | None = None,
    console: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table by `console`, and write `out` (.json) and the table beside it (.md).

    lengths: sequence lengths up to LONGEST, each a divisor of `tokens`, the tokens of a step. rule_lengths: those at
    which the attention of every normaliser is timed alone. rounds: 2 or more paired rounds after one to warm up. Raises
    ValueError where they do not fit.
    """
    for length in (*lengths, *rule_lengths):
        if not 2 <= length <= LONGEST or tokens % length:
            raise ValueError(f"lengths has {length}: must be 2 to {LONGEST} and divide the {tokens} tokens of a step")
    if rounds < 2:
        raise ValueError(f"rounds is {rounds}: must be 2 or more, or there is no spread")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = collect_provenance(out)
        rows = [row for length in lengths for row in _measure(length, rounds, tokens, console)]
        fewer = max(2, rounds // 2)  # nineteen paths take turns
        rules = [row for length in rule_lengths for row in measure_rules(length, fewer, tokens, console)]
        result = {
            **made,
            "model": to_dict(_make_config("untrained")) | {"vocabulary": VOCABULARY},
            "tokens": tokens,
            "rounds": rounds,
            "rows": rows,
            "rules": rules,
        }
    finally:
        torch.set_num_threads(threads)
    publish(result, format_table(result), out, console)
    return result


def format_table(result: Mapping[str, Any]) -> str:
    """The result as Markdown."""
    head = [
        "L", "state", "step: lazy / softmax", "softmax (ms)", "lazy (ms)", "softmax (tokens/s)", "lazy (tokens/s)",
        "attention alone: lazy / softmax", "entries cut", "mass left",
        *(f"empty tiles {TILE_ROWS}x{columns}" for columns in TILE_COLUMNS), "peak softmax (MiB)", "peak lazy (MiB)",
    ]  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---:|:---|" + "---:|" * (len(head) - 2)]
    for row in result["rows"]:
        step, attention = row["step"], row["attention"]
        cells = [
            str(row["length"]),
            row["state"],
            _format_spread(step["ratio"]),
            *(f"{1000 * step['seconds'][name]['median']:.0f}" for name in (SOFTMAX, "lazy")),
            *(f"{row['tokens_per_second'][name]:.0f}" for name in (SOFTMAX, "lazy")),
            _format_spread(attention["ratio"]),
            f"{row['entries_cut']:.1%}",
            f"{row['mass_left']:.4f}",
            *(f"{row['empty_tiles'][str(columns)]:.1%}" for columns in TILE_COLUMNS),
            *(_format_mebibytes(row["peak_bytes"][name]) for name in (SOFTMAX, "lazy")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    made = result["environment"]
    lines += [
        "",
        f"A training step of {result['tokens']} tokens in float32 on {made['threads']} thread: median of "
        f"{result['rounds']} paired rounds [quartiles]. Peak: rise of the resident memory over model and "
        "optimiser.",
        "",
        *format_rules_table(result["rules"]),
        format_provenance(result),
    ]
    return "\n".join(lines) + "\n"


def _format_spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.2f} [{spread['lower']:.2f}, {spread['upper']:.2f}]"


def _format_mebibytes(size: int | None) -> str:
    return "not measured" if size is None else f"{size / 2**20:.0f}"


def _make_config(variant: str) -> ModelConfig:
    lazy = AttentionSpec(Elastic(tau_init=1.0, threshold="per_query"), LearnedBias())
    attention = AttentionSpec() if variant == SOFTMAX else lazy
    return ModelConfig(d_model=256, n_layers=4, n_heads=4, d_ff=704, attention=attention, tie_embeddings=False)


def _make_model(variant: str, length: int) -> DecoderLM:
    model = DecoderLM(_make_config(variant), VOCABULARY, length, SEED)
    if variant == "local":
        for attention in model.attentions:
            attention.bias.table.data[:] = -torch.arange(length) / LOCAL_REACH  # type: ignore[union-attr]
    return model


def _make_step(model: DecoderLM) -> Callable[[Tensor], None]:
    """A whole training step on token ids `[B, L + 1]`; the weights stay as they are."""
    train = TrainConfig()
    optimizer = torch.optim.AdamW(build_parameter_groups(model, train), betas=train.betas)
    for group in optimizer.param_groups:
        group["lr"] = 0.0

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        token_nll(model(ids[:, :-1]), ids[:, 1:]).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
        optimizer.step()

    return step


def _draw_ids(length: int, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(VOCABULARY, (tokens // length, length + 1), generator=generator)


def _capture_attention_inputs(model: DecoderLM, ids: Tensor) -> list[AttentionCall]:
    """What each layer's normaliser is called with."""
    calls: list[AttentionCall] = []
    hooks = [a.normaliser.register_forward_pre_hook(lambda _, args: calls.append(args[0])) for a in model.attentions]
    with torch.no_grad():
        model(ids[:, :-1])
    for hook in hooks:
        hook.remove()
    return calls


def _make_attention_step(model: DecoderLM, ids: Tensor) -> Callable[[], None]:
    """Forward and backward pass of the first layer's attention alone, from q, k, v to their gradients."""
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
    console(f"L = {length}: {rounds} rounds of attention alone")
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
    """Share of visible entries that are cut, mean row mass, and share of tiles without a weight, over all layers.

    Tiles are counted per sequence and head, those above the diagonal left out.
    """
    length = ids.shape[1] - 1
    with torch.no_grad():
        stats = model.compute_hidden_with_stats(ids[:, :-1])[1]
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

    Attention itself sums a row's weights over tiles of columns when key j's value is 1 at j's tile and 0 elsewhere.
    """
    q, k, v, bias = call[:4]
    tile = torch.arange(k.shape[2]) // min(TILE_COLUMNS)
    indicator = nn.functional.one_hot(tile, v.shape[-1]).to(v.dtype).expand(*v.shape[:2], -1, -1)
    by_row = lazy_attention(q, k, indicator, tau, bias.table)[..., : int(tile[-1]) + 1]
    return _sum_neighbours(by_row, -2, TILE_ROWS)


def _sum_neighbours(x: Tensor, dim: int, size: int) -> Tensor:
    """Sums of `size` neighbours along `dim`; the last may be fewer."""
    return torch.stack([part.sum(dim) for part in x.split(size, dim)], dim)


def _measure_peak(variant: str, length: int, tokens: int) -> int | None:
    """Bytes by which a step raises the resident memory; None but on Linux (glibc)."""
    return run_in_process(__name__, _measure_peak_here, variant, length, tokens)


def _measure_peak_here(variant: str, length: int, tokens: int) -> int:
    ids = _draw_ids(length, tokens)
    model = _make_model(variant, length)
    step = _make_step(model)
    step(ids[:1, :17])  # makes the optimiser's state, and loads the libraries' own buffers
    model.zero_grad()
    return measure_memory_rise(lambda: step(ids))
