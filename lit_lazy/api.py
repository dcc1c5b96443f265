"""What `import lit_lazy` gives to a notebook: `train`, `load`, `show` and `results`.

Only `train` imports MLflow, when it is called.
"""

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_lazy.attention import Attention, AttentionCall, Eviction
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_experiment, load_module
from lit_lazy.data.source_interface import DataSource
from lit_lazy.figures.diagnostics import attention_maps
from lit_lazy.grid.ablation import check_name
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import SAMPLE, evaluation_mode, hook_layers, measure, sample_validation
from lit_lazy.measure.raise_thresholds import raise_thresholds
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Prompts, Sampling, generate
from lit_lazy.support.checked_fields import PositiveInt, Threads, check_value, fits, require
from lit_lazy.support.console import format_count
from lit_lazy.support.error_messages import did_you_mean, explain, short_repr
from lit_lazy.support.names_to_paths import find, find_grids, find_python_file
from lit_lazy.table.render import render_brief
from lit_lazy.table.results_table import Table
from lit_lazy.training import checkpoints
from lit_lazy.training.execution_settings import select_training_device
from lit_lazy.training.module import LitLM
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, METRICS, read_lines

if TYPE_CHECKING:
    from lit_lazy.grid.cell_record import CellRecord
    from lit_lazy.tracking.tracked_training import FinishedTraining

Prompt = TypeVar("Prompt", str, Sequence[int])
NO_ARRAY = (TypeError, ValueError, RuntimeError)
"""What torch raises for a value of which it makes no tensor."""
NAME = "notebook"
"""Of trainings of a config that comes from no file."""


def train(
    config: RunConfig | str,
    changes: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    runs: str | Path = "runs",
    threads: int | None = None,
    loggers: Sequence[str] = (),
) -> "FinishedTraining":
    """Train a config, or the experiment of this name or file, and keep the model, as `lit-lazy train` does.

    changes: new values by dotted path of the config. A run that was cut off is resumed, a finished one is returned as
    it is. name: of the folder in `runs` and of the
    experiment in MLflow, behind `train-`; that of the file by default, else "notebook". threads: of the CPU. loggers:
    csv, tensorboard or wandb beside MLflow. Returns `.metrics` (floats by name), `.checkpoint`, `.folder`,
    `.first_step` and `.dashboard`, the command that serves the curves. Raises ValueError, in one line, for a setting
    that cannot be trained here.

    >>> from lit_lazy import train
    >>> done = train("backcopy_tiny")
    >>> done.metrics["loss/val"] < done.metrics["init/loss/val"]
    True
    >>> done.checkpoint.name
    'final.ckpt'
    >>> from lit_lazy.attention import Elastic
    >>> train("backcopy_tiny", {"train.steps": 9, "model.attention.normaliser": Elastic()}).steps
    9
    """
    from lit_lazy.tracking.tracked_training import train_tracked
    from lit_lazy.training.logger_kinds import check_logger_kinds

    if name is not None:
        check_name("name", name)
    check_value("threads", threads, Threads | None)
    check_logger_kinds(_require_sequence("loggers", loggers), option="loggers")
    folder = _require_path("runs", runs)
    if isinstance(config, str):
        path = find("experiments", config)
        config, name = load_experiment(path), name or path.stem
    require(isinstance(config, RunConfig), "config", config, "must be a RunConfig, or the name or .py file of one")
    return train_tracked(replace_at(config, changes or {}), name or NAME, folder, threads, loggers=loggers)


def load(checkpoint: str | Path, imports: Sequence[str] = ()) -> "Model":
    """The trained model of a `final.ckpt`, on the accelerator if there is one.

    imports: .py files that define custom classes of the model. Raises ValueError, in one line, where it cannot be had.

    >>> from lit_lazy import load, train
    >>> model = load(train("backcopy_tiny").checkpoint)
    >>> model.config.model.d_model, model.decoder.attentions[0].n_heads
    (16, 1)
    """
    for file in _require_sequence("imports", imports):
        load_module(find_python_file("imports", str(_require_path("imports", file))))
    path = _require_path("checkpoint", checkpoint)
    module = checkpoints.load(path)
    return Model(path, module, module)


class Model:
    """A trained language model; `load` makes it.

    `config` is what it was trained with, `decoder` the torch module: tokens `[B, L]` to logits `[B, L, vocabulary]`.
    """

    def __init__(self, checkpoint: Path, trained: LitLM, module: LitLM) -> None:
        """trained: the checkpoint's own; module: that, or a changed one."""
        self._checkpoint, self._trained, self._module = checkpoint, trained, module
        self.config: RunConfig = module.cfg
        self.decoder: DecoderLM = module.model.to(select_training_device()).eval()

    def __repr__(self) -> str:
        model = self.config.model
        numbers = sum(parameter.numel() for parameter in self.decoder.parameters())
        sizes = f"{format_count(model.n_layers, 'layer')}, {format_count(numbers, 'parameter')}"
        return f"<Model: {model.rule}; {sizes}; {self._checkpoint}>"

    def generate(
        self,
        prompt: Prompt,
        tokens: int = 100,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        eviction: Eviction | None = None,
    ) -> Prompt:
        """What continues a prompt, without it: of a text a text, of token numbers token numbers.

        tokens: at most; it ends where the text's documents end. temperature: what logits are divided by, 0 for the most
        probable token. top_p: draw from the fewest tokens that have this probability together. eviction: what its cache
        keeps, such as `lit_lazy.attention.Eviction(first=4, window=64)`; None for all. Raises ValueError, in one line,
        for a prompt that the model cannot read, and for any other value out of range.

        >>> model = load(train("backcopy_tiny").checkpoint)
        >>> len(model.generate([0, 5, 3], tokens=4))
        4
        >>> model.generate("0 5 3", tokens=4, temperature=0).split() == [
        ...     str(token) for token in model.generate([0, 5, 3], tokens=4, temperature=0)
        ... ]
        True
        """
        check_value("tokens", tokens, PositiveInt)
        check_value("eviction", eviction, Eviction | None)
        sampling = Sampling(temperature, top_p, seed)
        given = self._encode("prompt", prompt)
        (found,) = generate(self.decoder, [given], tokens, sampling, self._prompts.special.ends, eviction)
        return cast(Prompt, "".join(self._prompts.decode(found, given)) if isinstance(prompt, str) else found)

    def split(self, text: str) -> list[str]:
        """The tokens of a text, each as a text of its own. Raises ValueError, in one line, if the model cannot read it.

        >>> load(train("backcopy_tiny").checkpoint).split("0 5 3")
        ['0', '5', '3']
        """
        given = self._encode("text", text)
        pieces = ("".join(self._prompts.decode([token], given[:i])) for i, token in enumerate(given))
        return [piece.removesuffix(" ") or " " for piece in pieces]

    @torch.no_grad()
    def weights(self, tokens: str | Sequence[int] | Tensor) -> Tensor:
        """The attention weights of a text or of L token numbers: float32 `[layers, H, L, L]`, on the CPU.

        Row i, column j: what query i gives key j, as it multiplies the value; 0 for a key that is hidden. All matrices
        are held at once. Raises ValueError, in one line, for tokens that the model cannot read, and where it has no
        attention.

        >>> model = load(train("backcopy_tiny").checkpoint)
        >>> weights = model.weights([0, 5, 3, 5, 9])
        >>> weights.shape, bool((weights.triu(1) == 0).all())
        (torch.Size([1, 1, 5, 5]), True)
        """
        require(bool(self.decoder.attentions), "weights", type(self.config.model.mixer).__name__, "has no attention")
        given = torch.tensor([self._encode("tokens", tokens)], device=self.decoder.device)
        self.decoder.check_length(given.shape[1])
        found: list[Tensor] = []

        def on_attention(_: int, attention: Attention, call: AttentionCall) -> None:
            weights = attention.normaliser.compute_weights(call)
            found.append(weights.w.masked_fill(~weights.rows.visible, 0)[0].float().cpu())

        with evaluation_mode(self.decoder), hook_layers(self.decoder, on_attention):
            self.decoder(given)
        return torch.stack(found)

    def diagnose(self, sequences: int = SAMPLE) -> Diagnostics:
        """Sinks, mass, sparsity and collapse of its heads and hidden states, on so many validation sequences at most.

        `.arrays` are all arrays `[layers, H, ...]` by name, `.metrics()` their means over layers and heads.
        Raises ValueError, in one line, where the data of the training cannot be had.

        >>> model = load(train("backcopy_tiny").checkpoint)
        >>> found = model.diagnose(sequences=8)
        >>> found.arrays["sink/weight"].shape
        (1, 1, 8)
        >>> 0 <= found.metrics()["sink/rate"] <= 1
        True
        """
        return measure(self.decoder, sample_validation(self._load_data(), sequences), sample=sequences)

    def with_(self, changes: Mapping[str, Any]) -> "Model":
        """The model under other settings, on its weights where name, shape and class of the part match.

        All others start as in training, and a warning names them. The weights are shared, so training one model
        changes the other.

        changes: values by dotted path of `config`, below `model` or `data`. Raises ValueError, in one line, for an
        unknown path or a value that does not fit.

        >>> from lit_lazy.attention import Elastic
        >>> model = load(train("backcopy_tiny").checkpoint)
        >>> changed = model.with_({"model.attention.normaliser": Elastic(tau_init=0.5)})
        >>> bool((changed.weights(range(9)) <= model.weights(range(9))).all())
        True
        """
        config = replace_at(self.config, changes)
        checkpoints.require_changeable(changes)
        changed = checkpoints.change_model(self._module, config)
        return Model(self._checkpoint, self._trained, changed)

    def raise_thresholds(self, rise: float, sequences: int = SAMPLE) -> Tensor:
        """Raise tau of each head from 0 until the loss on validation sequences is `rise` nats higher: `[layers, H]`.

        The taus stay in the model. No tau exceeds 4: a warning says so if the loss then rises by less.
        Raises ValueError, in one line, where it has no tau per head, or was trained with it, or has no data.

        >>> from lit_lazy.attention import Elastic
        >>> changed = load(train("backcopy_tiny").checkpoint).with_({"model.attention.normaliser": Elastic()})
        >>> changed.raise_thresholds(rise=0.01).shape
        torch.Size([1, 1])
        """
        (batch,) = sample_validation(self._load_data(), sequences)
        return raise_thresholds(self.decoder, batch, rise)

    def _load_data(self) -> DataSource:
        return checkpoints.load_data_for(self._checkpoint, self._trained, self.config.data)

    @cached_property
    def _prompts(self) -> Prompts:
        return checkpoints.load_prompts(self._checkpoint, self._trained, self.config.data)

    @property
    def _vocabulary(self) -> int:
        return self.decoder.embedding.num_embeddings

    def _encode(self, what: str, given: str | Sequence[int] | Tensor) -> list[int]:
        """The numbers of a text's tokens, or those that are given."""
        if isinstance(given, str):
            return self._prompts.encode(f"{what}={short_repr(given)}", given.encode())
        try:
            numbers = [operator.index(token) for token in given]
        except TypeError:  # none that can be counted, or not whole
            numbers = []
        readable = bool(numbers) and all(0 <= token < self._vocabulary for token in numbers)
        require(readable, what, given, f"must be one list of whole numbers, each from 0 to {self._vocabulary - 1}")
        return numbers


def _require_path(what: str, given: str | Path) -> Path:
    require(isinstance(given, str | os.PathLike) and str(given) != "", what, given, "must be a path")
    return Path(given)


def _require_sequence(what: str, given: Sequence[str]) -> Sequence[str]:
    """What is given, unless it is a text, which would be taken for its letters."""
    require(fits(given, Sequence[str]), what, given, "must be a list or tuple, also of one name")
    return given


def show(weights: Tensor | np.ndarray, labels: Sequence[str] = ()) -> Figure:
    """A figure of attention weights `[L, L]`, `[H, L, L]` or `[layers, H, L, L]`: a map for each head, on a log scale.

    Exact zeros are grey, keys that come later white; the first keys are enlarged below. Choose a few heads of many, as
    in `weights[:2]`. `savefig` of the figure writes it. labels: a text for each of the L positions, as
    `model.split(text)` gives it. Raises ValueError, in one line, for another shape or number.

    >>> from lit_lazy import load, show, train
    >>> figure = show(load(train("backcopy_tiny").checkpoint).weights(range(12)))
    >>> figure.savefig("heads.png")
    """
    with explain(f"weights={short_repr(weights)}", "give an array, as `model.weights(text)` returns", *NO_ARRAY):
        given = torch.as_tensor(weights).detach().cpu().to(torch.float32).numpy()
    square = 2 <= given.ndim <= 4 and given.shape[-1] == given.shape[-2] and given.size > 0
    require(square, "weights", list(given.shape), "must have the shape [L, L], [H, L, L] or [layers, H, L, L]")
    require(
        bool(np.isfinite(given).all()), "weights", list(given.shape), "must be finite; hidden keys have the weight 0"
    )
    fix = f"must be a text for each of the {given.shape[-1]} positions, or none"
    require(len(labels) in (0, given.shape[-1]), "labels", f"{len(labels)} texts", fix)
    by_head = given.reshape(-1, *given.shape[-3:]) if given.ndim > 2 else given[None, None]
    layers, heads, length, _ = by_head.shape
    first = 0 if given.ndim == 4 else -1  # of an array of heads, whose layer and numbers are unknown
    places = np.array([(first + layer, head) for layer in range(layers) for head in range(heads)])
    maps = {"maps/weights": by_head.reshape(-1, length, length), "maps/heads": places}
    figure = attention_maps(maps, [*map(str, labels)])
    assert figure is not None  # there are maps
    return figure


@dataclass(frozen=True)
class Results:
    """What an ablation has found so far; `results` makes it. A notebook shows its table."""

    table: Table
    """Rows with means, intervals and tests, and the verdict of a question: what `lit-lazy ablate table` prints."""
    cells: pd.DataFrame
    """A line for each cell: variant, seed, status, key, folder, checkpoint (if it was kept) and commit, then params and
    metrics by name; NaN where one has none."""
    curves: pd.DataFrame
    """What was logged during the trainings: a line for each variant, seed, step and metric, with its value."""

    def __repr__(self) -> str:
        done, cells = self.table.count_cells()
        name = f"{self.table.ablation}-{self.table.base}"
        variants = format_count(len(self.table.rows), "variant")
        return f"<{name}: {variants}, {done} of {cells} cells finished; print it for its table>"

    def __str__(self) -> str:
        return render_brief(self.table)

    def _repr_markdown_(self) -> str:
        return str(self)


def results(name: str, runs: str | Path = "runs") -> Results:
    """What a runs folder holds of an ablation on an experiment, finished or not.

    name: as `table2-backcopy`; `table2` is enough if it is the only one on an experiment.
    runs: the folder with its results. Raises ValueError, in one line, where there is none of this name.
    In `.curves`, as in `metrics.jsonl` and MLflow, the model after s steps has its `watch/...` at step s, but its
    `val/...` at s - 1.

    >>> from lit_lazy import results
    >>> found = results("table2-backcopy")
    >>> found.table.baseline in set(found.cells["variant"])
    True
    >>> means = found.cells.groupby("variant")["loss/val"].mean()
    >>> bool((means > 0).all())
    True
    """
    from lit_lazy.grid.grid_folder import list_grids, read_grid

    folder = _require_path("runs", runs)
    known = list_grids(folder)
    near = did_you_mean(str(name), [*known, *(grid.partition("-")[0] for grid in known)])
    same = find_grids(str(name), known, lambda grid: read_grid(folder / grid).plan.ablation)
    has = f"it has {', '.join(known) or 'none'}; `lit-lazy ablate run` makes one"
    require(bool(same), "results", name, f"{folder} holds no such ablation{near}; {has}")
    require(len(same) == 1, "results", name, f"{folder} has several; give one of {', '.join(same)}")
    grid = read_grid(folder / same[0])
    curves = pd.DataFrame(_iter_curve_points(grid.cells), columns=["variant", "seed", "step", "metric", "value"])
    return Results(grid.build_table(), pd.DataFrame([_make_cell_record(cell) for cell in grid.cells]), curves)


def _make_cell_record(cell: "CellRecord") -> dict[str, Any]:
    kept = cell.folder / FINAL_CHECKPOINT
    about = {
        "variant": cell.variant,
        "seed": cell.seed,
        "status": cell.status,
        "key": cell.key,
        "folder": str(cell.folder),
        "checkpoint": str(kept) if kept.exists() else None,
        "git_sha": None if cell.result is None else cell.result.environment["git_sha"],
    }
    known = {**about, **cell.settings, **cell.axes}
    return known | {f"metric {name}" if name in known else name: value for name, value in cell.metrics.items()}


def _iter_curve_points(cells: Iterable["CellRecord"]) -> Iterator[tuple[str, int, int, str, float]]:
    for cell in cells:
        for record in read_lines(cell.folder / METRICS):
            for name, value in record.metrics.items():
                yield cell.variant, cell.seed, record.step, name, value
