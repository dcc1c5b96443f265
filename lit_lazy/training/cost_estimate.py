"""Estimates of a training's cost: parameters, tokens, FLOPs, memory by part, hours, disk."""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import chain

import torch
from rich.filesize import decimal
from torch.utils.benchmark import Timer

from lit_lazy.attention import PassInputs
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.data.source_interface import Outline
from lit_lazy.model.decoder import Block, DecoderLM, build_empty, flops_per_token
from lit_lazy.model.loss import LOGITS_AT_ONCE, token_nll
from lit_lazy.support.checked_fields import require
from lit_lazy.support.console import format_count, format_duration
from lit_lazy.support.machine import measure_saved_bytes, measure_total_memory
from lit_lazy.training.check_before_run import prepare_outline
from lit_lazy.training.execution_settings import Execution, find_missing_gpu, select_training_device
from lit_lazy.training.ineffective_settings import check_init_from, list_ineffective
from lit_lazy.training.trained_parameters import build_optimizer, find_block_matrices, freeze_others

UTILISATION = 0.2
"""Share of the peak FLOP/s: that of a 340M model with lazy attention at 2,048 tokens on an H100, compiled 0.29, at
8,192 tokens 0.16 (docs/results/kernels/h100, h100-compiled). An H200 reached a tenth more (gpu-step.md)."""
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 FLOP/s from the data sheets."""
ASSUMED = "H200"
"""Without a known GPU on this machine."""
PRODUCT_SECONDS = 0.2
TIMED_STEPS = 5
MOST_FLOPS_OF_A_TIMED_STEP = 3e11
"""About ten seconds on one core."""
FP32_BYTES = 4
"""fp32: weights, gradients and moments in every precision."""
LOGITS_COPIES = 3
"""The product, its fp32 copy or softmax, and the gradient."""
MEASURED_TOKENS = 128
"""Number of tokens at which the saved memory of a block is measured."""


@dataclass(frozen=True)
class Cost:
    """Cost of a training with a given execution."""

    parameters: int
    tokens: int
    flops: float
    memory: dict[str, int]
    """Peak bytes on each device by purpose, without libraries."""
    parts: int
    """Micro-batches per step on each device."""
    disk: int
    """Bytes while it runs: a checkpoint, and the next one while it is written."""

    @property
    def device_bytes(self) -> int:
        """Total peak bytes on each device."""
        return sum(self.memory.values())

    def estimate_hours(self, devices: int, peak: float) -> float:
        """Hours at UTILISATION of the devices' peak, in FLOP/s."""
        return self.flops / (devices * UTILISATION * peak) / 3600


def estimate_cost(cfg: RunConfig, data: Outline, execution: Execution) -> Cost:
    """Estimate the cost of `cfg`. Raises ValueError if its batch cannot be split over the devices."""
    parts = execution.accumulation_steps(cfg.train.batch_size)
    model = build_empty(cfg.model, data.vocab_size, data.context_length)
    forward = flops_per_token(model, data.context_length) // 3
    freeze_others(model, cfg.train.trainable)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    shards = execution.devices if execution.strategy == "fsdp" else 1
    weights, gradients = (FP32_BYTES * count // shards for count in (parameters, trained))
    pass_tokens = cfg.train.batch_size // execution.devices // parts * data.context_length
    matrices, optimiser = {id(matrix) for matrix in find_block_matrices(model)}, cfg.train.optimiser
    states = (p.numel() * optimiser.moments(id(p) in matrices) for p in model.parameters() if p.requires_grad)
    moments = FP32_BYTES * sum(states)
    average = FP32_BYTES * trained if cfg.train.ema_decay else 0
    memory = {
        "weights": weights,
        "gradients": gradients,
        "optimiser": moments // shards,
        **({"average": average} if average else {}),
        **({"teacher": weights} if cfg.train.distillation.active else {}),
        "activations": _estimate_activation_bytes(cfg, model, pass_tokens, execution),
        "logits": LOGITS_COPIES * FP32_BYTES * min(pass_tokens * data.vocab_size, max(data.vocab_size, LOGITS_AT_ONCE)),
    }
    tokens = cfg.train.steps * cfg.train.batch_size * data.context_length
    flops = float(tokens) * (flops_per_token(model, data.context_length) + forward * cfg.train.distillation.active)
    return Cost(parameters, tokens, flops, memory, parts, disk=2 * (FP32_BYTES * parameters + average + moments))


def _estimate_activation_bytes(cfg: RunConfig, model: DecoderLM, tokens: int, execution: Execution) -> int:
    """Bytes saved for the backward pass of `tokens` tokens."""
    trained = [frozenset(name for name, p in block.named_parameters() if p.requires_grad) for block in model.blocks]
    measured = {
        names: measure_block_activations(cfg.model, model.context_length, cfg.train.precision == "bf16", names)
        for names in {*trained}
    }
    blocks = [fixed + tokens * per_token for fixed, per_token in (measured[names] for names in trained)]
    stream = tokens * FP32_BYTES * cfg.model.d_model
    layers = len(blocks) * stream + max(blocks) if execution.checkpoint_activations else sum(blocks)
    return round(layers + 3 * stream)  # the embeddings, and the last norm's input and output


def measure_block_activations(
    cfg: ModelConfig, context_length: int, bf16: bool, trained: Collection[str]
) -> tuple[float, float]:
    """Constant and per-token bytes that one block saves for its backward pass, measured on the CPU with few tokens.

    trained: names of the block's trained parameters; the others save fewer inputs. Under bf16 the constant part
    includes the matrices cast to bf16.
    """
    backend = "auto" if select_training_device().type == "cpu" else "chunked"  # which saves what a GPU's kernels do
    block = Block(dataclasses.replace(cfg, backend=backend), context_length, layer=0)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(name in trained)
    rotation = cfg.position.build(cfg.d_model, block.attention.rotary_dim, context_length).rotation

    def measure_bytes(length: int) -> int:
        x = torch.randn(1, length, cfg.d_model, generator=torch.Generator().manual_seed(0), requires_grad=True)
        inputs = PassInputs(rotation(length, 0), dropout_keys=torch.zeros(1, dtype=torch.int64))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return measure_saved_bytes(lambda: block(x, inputs), chain(block.parameters(), block.buffers()))

    long = min(context_length, MEASURED_TOKENS)
    short = (long + 1) // 2
    few, many = measure_bytes(short), measure_bytes(long)
    per_token = (many - few) / (long - short) if long > short else many
    return max(0.0, many - per_token * long), per_token


def require_fit(cost: Cost, execution: Execution) -> None:
    """Raises a one-line ValueError if the training does not fit in the memory of this machine's devices."""
    if torch.cuda.is_available():
        where, available = "each GPU", torch.cuda.get_device_properties(0).total_memory
    else:
        where, available = "each of the processes on this machine", measure_total_memory() // execution.devices
    needs = f"needs {format_memory(cost)} on each device, and {where} has {available / 1e9:.1f} GB"
    fix = "give a smaller --micro-batch, --checkpoint-activations, or --strategy fsdp with more devices"
    require(cost.device_bytes <= available, "--micro-batch", execution.micro_batch, f"{needs}; {fix}")


def format_memory(cost: Cost) -> str:
    """The memory by part: `11.4 GB (weights 1.5 GB, gradients 1.5 GB, ...)`."""
    by_part = ", ".join(f"{name} {decimal(size)}" for name, size in cost.memory.items())
    return f"{decimal(cost.device_bytes)} ({by_part})"


def find_peak_flops(gpu: str | None = None) -> tuple[str, float]:
    """Name and peak FLOP/s of a GPU: this machine's if its data sheet is known, else the assumed one.

    gpu: the name of another that is to be assumed. Raises a one-line ValueError if its peak is not known.
    """
    if gpu is not None:
        found = gpu.upper()
        require(found in PEAKS, "--gpu", gpu, f"must be one of {', '.join(PEAKS)}")
        return found, PEAKS[found]
    found = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    name = next((kind for kind in PEAKS if kind in found), ASSUMED)
    return name, PEAKS[name]


@cache
def measure_cpu_flops() -> float:
    """FLOP/s of a product of matrices in fp32 on this machine's CPU, with the threads that torch uses.

    A training is slower: it does more than products of matrices.
    """
    size = 1024
    a, b = torch.rand(2, size, size)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=PRODUCT_SECONDS).mean


def estimate_seconds(cfg: RunConfig, data: Outline, cost: Cost, execution: Execution) -> tuple[float, str]:
    """Seconds of a training on this machine, or on assumed GPUs if it needs several, and what they follow from."""
    if cost.flops / cfg.train.steps < MOST_FLOPS_OF_A_TIMED_STEP:
        return estimate_training_seconds(cfg, data), f"{TIMED_STEPS} timed steps on one device"
    if execution.devices == 1 and not torch.cuda.is_available():
        return cost.flops / measure_cpu_flops(), "the speed of a product of matrices here"
    kind, peak = find_peak_flops()
    basis = f"{UTILISATION:.0%} of the peak of {execution.devices} {kind} each"
    return 3600 * cost.estimate_hours(execution.devices, peak), basis


def estimate_training_seconds(config: RunConfig, data: Outline) -> float:
    """Estimated seconds of training, from timed steps on random tokens."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DecoderLM(config.model, data.vocab_size, data.context_length, seed=0).to(device)
    optimizer = build_optimizer(model, config.train)
    shape = 2, config.train.batch_size, data.context_length
    tokens, targets = torch.randint(data.vocab_size, shape, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.precision == "bf16"):
            loss = token_nll(model(tokens), targets).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
    return timer.timeit(TIMED_STEPS).mean * config.train.steps  # after two to warm up


def format_dry_run(name: str, cfg: RunConfig, execution: Execution, gpu: str | None = None) -> list[str]:
    """Lines of a dry run, which tokenises no text. gpu: as in `find_peak_flops`.

    Raises ValueError as the training would, except for memory and backends, since another machine may train it.
    """
    source = prepare_outline(cfg, elsewhere=True)
    execution.check(cfg.train)
    check_init_from(cfg, source)
    cost = estimate_cost(cfg, source, execution)
    step = cfg.train.batch_size * source.context_length
    kind, peak = find_peak_flops(gpu)
    sequences = format_count(cfg.train.batch_size // execution.devices // cost.parts, "sequence")
    where = f"on each of {execution.devices} devices" if execution.devices > 1 else "on 1 device"
    hours = cost.estimate_hours(execution.devices, peak)
    price = f", {hours * execution.devices:,.0f} GPU-hours" if hours >= 1 else ""
    minutes = f"{60 * hours:.1f} min" if hours >= 1 / 60 else "less than a minute"
    there = f"{f'{hours:.1f} h' if hours >= 1 else minutes} on {execution.devices} {kind}{price}"
    here, missing = "", find_missing_gpu(cfg.model.backend)
    if execution.devices == 1 and not torch.cuda.is_available() and not missing:
        seconds, basis = estimate_seconds(cfg, source, cost, execution)
        here = f"here about {format_duration(seconds)}, from {basis}; "
    return [
        f"{name}: {cost.parameters:,} parameters; attention: {cfg.model.rule}",
        _format_data(source, cost),
        f"step:   {step:,} tokens; {where} {format_count(cost.parts, 'micro-batch', 'micro-batches')} of {sequences}",
        f"FLOPs:  {cost.flops / cost.tokens:.3g} a token, {cost.flops:.3g} in all",
        f"memory: {format_memory(cost)} on each device, and about 1 GB of libraries",
        f"time:   {here}{there}, at an assumed {UTILISATION:.0%} of {peak / 1e12:.0f} TFLOP/s each",
        f"disk:   {decimal(cost.disk)} while it runs, for checkpoints",
        *([f"here:   model.backend={cfg.model.backend!r} {missing}"] if missing else []),
        *(f"note:   {note}" for note in (source.assumed, *list_ineffective(cfg, source.context_length)) if note),
    ]


def _format_data(source: Outline, cost: Cost) -> str:
    if source.sequences is None:
        how = f"run `lit-lazy tokenise` to count those of {source.name}"
        return f"data:   the training sees {cost.tokens:,} tokens; {how}"
    available = source.sequences * source.context_length
    passes = f"{cost.tokens / available:.3g}"
    passes += " pass" if passes == "1" else " passes"
    return f"data:   {available:,} tokens of {source.name}; the training sees {cost.tokens:,}, so {passes}"
