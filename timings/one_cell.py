"""Train one cell and print its cost as JSON; `timings.cells` runs it as a script, on the code of either commit.

    PYTHONPATH=TREE:TREE/kernels python3 -P one_cell.py TREE EXPERIMENT ROW [--seed N] [--steps N]

It therefore imports nothing of `timings`, and of `lit_lazy` only what both commits have under the same name.
"""

import argparse
import functools
import gc
import json
import runpy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

import lit_lazy
from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias
from lit_lazy.config.schema import RunConfig
from lit_lazy.training import run as run_module
from lit_lazy.training.module import LitLM

ROWS = {"lazy": AttentionSpec(Elastic(), LearnedBias()), "softmax": AttentionSpec()}
PHASES = (
    "data", "measured before", "forward", "backward", "optimiser", "watch", "validation", "measured after", "rest",
)  # fmt: skip
"""Where a cell's seconds go. "rest": Lightning's loop, the loader, checkpoints and building the model."""
WARM_UP = "backcopy_tiny"
"""Trained first: late imports and a library's first call are not a cell's, as a worker trains many."""
METRICS = ("loss/val", "loss/excess", "sink/first_key_share", "tau/mean", "sparsity/zero")
"""Final metrics that a cell's cost records, if the cell has them."""
MONITOR = "Watch"
"""State key of the head monitor, whose class has another name in each commit."""
PRODUCT_SIZE, PRODUCTS = 1024, 8


@dataclass(frozen=True)
class CellCost:
    """Cost of a cell around `run`, without imports. Seconds are the process's CPU time, except `wall_seconds`."""

    backend: str
    steps: int
    flops_per_step: float
    seconds: float
    wall_seconds: float
    phases: dict[str, float]
    """CPU seconds by phase; their sum is `seconds`."""
    product_rate: float
    """FLOP/s of a large float32 product on one thread, just before and after the cell."""
    seed: int
    metrics: dict[str, float]


class PhaseClock(L.Callback):
    """Attributes the CPU time of this process to phases; a phase inside another counts for itself only."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._open = ["rest"]
        self._since = time.process_time()

    def start(self, phase: str) -> None:
        """Begin a phase inside the present one."""
        self.charge()
        self._open.append(phase)

    def stop(self) -> None:
        """Return to the phase around the present one."""
        self.charge()
        self._open.pop()

    def charge(self) -> None:
        """Attribute the time since the last call to the present phase."""
        now = time.process_time()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Attribute a block to a phase."""
        self.start(phase)
        try:
            yield
        finally:
            self.stop()

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Attribute all calls of `owner.name` to a phase."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def run_timed(*args: Any, **kwargs: Any) -> Any:
            with self.time(phase):
                return original(*args, **kwargs)

        setattr(owner, name, run_timed)

    def wrap_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Attribute `optimizer.step` to its phase, without the closure, in which Lightning computes the gradients."""
        original = optimizer.step

        @functools.wraps(original)
        def step(closure: Callable[[], Any]) -> Any:
            def compute_gradients() -> Any:
                with self.time("rest"):
                    return closure()

            with self.time("optimiser"):
                return original(compute_gradients)

        optimizer.step = step  # type: ignore[method-assign]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:  # noqa: ARG002
        """Wrap the head monitor of this training."""
        [monitor] = [callback for callback in trainer.callbacks if callback.state_key == MONITOR]  # type: ignore[attr-defined]
        for hook in ("on_train_start", "on_train_batch_end", "on_validation_end"):
            self.wrap(monitor, hook, "watch")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        for optimizer in trainer.optimizers:
            self.wrap_step(optimizer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        self.start("validation")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:  # noqa: ARG002
        self.stop()


def time_phases() -> PhaseClock:
    """A clock of the next cell of this process, whose callback it must be."""
    clock = PhaseClock()
    clock.wrap(run_module, "prepare", "data")
    clock.wrap(LitLM, "training_step", "forward")
    clock.wrap(LitLM, "backward", "backward")
    for name in ("optimizer_zero_grad", "configure_gradient_clipping"):
        clock.wrap(LitLM, name, "optimiser")
    name = next(name for name in ("measure_model", "measured") if hasattr(run_module, name))
    measure, phases = getattr(run_module, name), iter(("measured before", "measured after"))

    def measure_in_phase(*args: Any, **kwargs: Any) -> Any:
        with clock.time(next(phases)):
            return measure(*args, **kwargs)

    setattr(run_module, name, measure_in_phase)
    return clock


def load_cell(tree: Path, experiment: str, row: str, seed: int, steps: int | None) -> RunConfig:
    """The config of a row on an experiment of the tree; steps: None for the experiment's own."""
    cfg = runpy.run_path(str(tree / "experiments" / f"{experiment}.py"))["config"]()
    train = cfg.train
    if steps is not None:
        train = replace(train, steps=steps, warmup_steps=min(train.warmup_steps, steps - 1))
    return replace(cfg, model=replace(cfg.model, attention=ROWS[row]), train=train, seed=seed)


def measure_cell(tree: Path, experiment: str, row: str, seed: int, steps: int | None) -> CellCost:
    """Train a cell in a new folder, on one thread."""
    torch.set_num_threads(1)
    cfg = load_cell(tree, experiment, row, seed, steps)
    train_cell(load_cell(tree, WARM_UP, row, 0, None))
    gc.freeze()  # as a worker does
    rates = measure_product_rates()
    wall, clock = time.perf_counter(), time_phases()
    result = train_cell(cfg, clock)
    clock.charge()
    wall = time.perf_counter() - wall
    tokens = cfg.train.batch_size * cfg.data.context_length  # type: ignore[attr-defined]
    return CellCost(
        backend=result.labels["backend"],
        steps=cfg.train.steps,
        flops_per_step=tokens * result.metrics["model/flops_per_token"],
        seconds=sum(clock.seconds.values()),
        wall_seconds=wall,
        phases=clock.seconds,
        product_rate=statistics.median([*rates, *measure_product_rates()]),
        seed=seed,
        metrics={name: result.metrics[name] for name in METRICS if name in result.metrics},
    )


def train_cell(cfg: RunConfig, *callbacks: L.Callback) -> Any:
    """The result of a cell, with the one logger of files that the code of either commit has."""
    with tempfile.TemporaryDirectory(prefix="lit-lazy-bench-") as name:
        folder = Path(name)
        return run_module.run(cfg, folder, logger=CSVLogger(folder), callbacks=callbacks)


def measure_product_rates() -> list[float]:
    """FLOP/s of some products of two large matrices in float32, after one to warm up."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE) for _ in range(2))
    rates = []
    for _ in range(PRODUCTS + 1):
        started = time.process_time()
        torch.mm(a, b)
        rates.append(2 * PRODUCT_SIZE**3 / (time.process_time() - started))
    return rates[1:]


def main() -> None:
    """Measure the cell of the command line. Raises RuntimeError if `lit_lazy` is not that of the tree."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tree", type=Path)
    parser.add_argument("experiment")
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int)
    options = parser.parse_args()
    if not Path(lit_lazy.__file__).is_relative_to(options.tree):
        raise RuntimeError(f"lit_lazy is {lit_lazy.__file__}: PYTHONPATH must begin with {options.tree}")
    cost = measure_cell(options.tree, options.experiment, options.row, options.seed, options.steps)
    print(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()
