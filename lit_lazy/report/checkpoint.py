"""Everything about a checkpoint's heads and hidden states, into a folder and an MLflow run: `lit-lazy diagnose`."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lit_lazy.attention import Eviction
from lit_lazy.config.files import find, load_experiment
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.data import DataConfig, DataSource
from lit_lazy.figures import FIGURE_NAMES, draw_run_figures, save_figure
from lit_lazy.measure import lengths
from lit_lazy.measure.diagnostics import (
    SAMPLE,
    STRONGEST,
    Diagnostics,
    Maps,
    measure,
    sample_validation,
)
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.console import format_duration
from lit_lazy.support.disk import check_writable_folder, write_text
from lit_lazy.support.errors import UnfinishedError, one_line
from lit_lazy.support.provenance import collect_environment
from lit_lazy.support.secrets import format_command_line
from lit_lazy.tracking.store import TrackingError, check_store, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training import checkpoints
from lit_lazy.training.devices import select_training_device
from lit_lazy.training.head_monitor import STATE_KEY, tau_history
from lit_lazy.training.module import LitLM
from lit_lazy.training.prepare import load_data
from lit_lazy.training.result import FINAL_CHECKPOINT

EXPERIMENT = "diagnose"
"""Of MLflow."""
SAMPLED = {
    "loss/sample": "loss/by_position",
    "mass/all": "mass/row",
    "sparsity/zero": "sparsity/zero",
    "sparsity/null": "sparsity/null",
    "tau/mean": "tau",
}
"""Metric, and the array it is the mean of."""
MOST_TOKENS = 2**17
"""Of a sequence: what more would take, no progress bar shows."""
ARRAYS, FACTS = "diagnostics.npz", "diagnostics.json"


@dataclass(frozen=True)
class Request:
    """What `lit-lazy diagnose` is asked for."""

    checkpoint: Path
    data: str | None = None
    """Experiment whose data are measured; None for those the model was trained on."""
    lengths: tuple[int, ...] = ()
    """Further context lengths to measure at."""
    eviction: Eviction | None = None
    """Of a cache with which the losses are measured again, at every length; None for no such measurement."""
    maps: Maps = STRONGEST
    sequences: int = SAMPLE
    out: Path | None = None
    """Folder for the results; None for one in `runs`."""
    runs: Path = Path("runs")

    @property
    def name(self) -> str:
        """The checkpoint's, and that of other data."""
        path = self.checkpoint.resolve()
        name = path.parent.name if path.name == FINAL_CHECKPOINT else path.stem
        return name + (f"-{Path(self.data).stem}" if self.data else "")

    @property
    def folder(self) -> Path:
        """Where the results are written."""
        return self.out or self.runs / f"diagnose-{self.name}"


def diagnose(request: Request, console: Callable[[str], None] = print) -> Diagnostics:
    """Measure a checkpoint, its model before training, and it at other lengths; write, log and print the results.

    Raises ValueError, in one line and before anything is created, where the checkpoint, a layer, a head, the data or a
    length cannot be had; UnfinishedError where MLflow does not take the results, which are in the folder then.
    """
    module = checkpoints.load(request.checkpoint)
    request.maps.check(module.model, "--")
    module.model.new_cache(request.eviction)
    taus = read_taus(request.checkpoint)
    sources = load_sources(request, module)
    check_writable_folder("--runs", request.runs)
    check_writable_folder("--out", request.folder)
    uri = default_uri(request.runs)
    check_store(uri)

    measured = measure_all(module, sources, taus, request, console)
    metrics = measured.scalars() | compute_metrics(measured)
    files = write_results(measured, metrics, sources, request)
    console(f"\n{format_table(metrics, measured.prefixes)}")
    console(f"\nfiles: {request.folder} ({', '.join(file.name for file in files)})")
    track(Tracker(uri, request.runs, EXPERIMENT), module.cfg, metrics, files, sources[""], request)
    return measured


def read_taus(checkpoint: Path) -> dict[int, torch.Tensor]:
    """The taus `[layers, H]` that were kept during training, by step. Raises ValueError, in one line, for any other."""
    taus = checkpoints.read_callback_state(checkpoint, STATE_KEY).get("taus", {})
    shapes = {getattr(tau, "shape", None) for tau in taus.values()} if isinstance(taus, dict) else {None}
    if (
        not all(len(shape or ()) == 2 for shape in shapes)
        or len(shapes) > 1
        or not all(type(step) is int for step in taus)
    ):
        raise ValueError(f"checkpoint {str(checkpoint)!r}: the taus kept during training are damaged; train again")
    return taus


def load_sources(request: Request, module: LitLM) -> dict[str, DataSource]:
    """The data by the prefix of their arrays, "" and `L<length>/`.

    Raises ValueError, in one line, where they cannot be had, or the model cannot read them.
    """
    if request.data is None:
        config, named = module.cfg.data, f"checkpoint {str(request.checkpoint)!r}"
        source = checkpoints.load_training_data(request.checkpoint, module)
    else:
        config, named = load_experiment(find("experiments", request.data)).data, f"--data {request.data!r}"
        source = load_data(config)
        if source.vocab_size != module.hparams["vocab_size"]:
            raise ValueError(
                f"{named}: the model reads a vocabulary of {module.hparams['vocab_size']} tokens, these data have "
                f"{source.vocab_size}; name an experiment whose data agree"
            )
    check_length(module.model, source.context_length, named)
    longer = {f"L{length}/": load_at_length(config, length, source, module.model) for length in request.lengths}
    return {"": source, **longer}


def load_at_length(config: DataConfig, length: int, source: DataSource, model: DecoderLM) -> DataSource:
    """The same data in sequences of another length. Raises ValueError, in one line, where that cannot be."""
    option = f"--lengths {length}"
    if length == source.context_length:
        return source
    if length > MOST_TOKENS:
        raise ValueError(f"{option}: must be at most {MOST_TOKENS}")
    try:
        longer = config.at_length(length)
        model.check_length(length)
        return load_data(longer)
    except ValueError as error:
        raise ValueError(f"{option}: {one_line(error)}") from None


def check_length(model: DecoderLM, length: int, option: str) -> None:
    """Raise ValueError, in one line, where the positions or the bias cannot serve so many tokens."""
    try:
        model.check_length(length)
    except ValueError as error:
        raise ValueError(f"{option}: {one_line(error)}") from None


def measure_all(
    module: LitLM,
    sources: Mapping[str, DataSource],
    taus: Mapping[int, torch.Tensor],
    request: Request,
    console: Callable[[str], None],
) -> Diagnostics:
    """The trained model, `init/` the same before training, and `L<length>/` the trained at other lengths.

    Each takes seconds to minutes, so the console says so before.
    """
    device = select_training_device()
    untrained, model = LitLM(**module.hparams).model.to(device), module.model.to(device)
    # The model itself comes first: what cannot be measured of it is not measured of the others.
    order = {"": sources[""], "init/": sources[""], **{prefix: sources[prefix] for prefix in sources if prefix}}
    samples = {prefix: sample_validation(source, request.sequences) for prefix, source in order.items()}
    evicting = len(sources) if request.eviction else 0
    course = _Progress([sample[0]["tokens"].numel() for sample in samples.values()], evicting, console)
    parts = {}
    for prefix, sample in samples.items():
        n, length = sample[0]["tokens"].shape
        measured = untrained if prefix == "init/" else model
        what = f"the {'untrained' if measured is untrained else 'trained'} model"
        course.begin(f"{what}: {n} sequences of {length} tokens")
        maps = request.maps if not prefix else None
        found = measure(measured, sample, maps, request.sequences).arrays | lengths.compute_length_arrays(
            measured, length
        )
        course.end(n * length)
        if not prefix:
            found |= tau_history(taus)
        if request.eviction is not None and measured is model:
            kept = f"the first {request.eviction.first} and {request.eviction.window} newest tokens"
            course.begin(f"it again with {kept} in its cache, token by token")
            found |= lengths.compute_streaming_arrays(model, sample[0], request.eviction)
        parts[prefix] = Diagnostics(found)
    return Diagnostics.merge(parts)


class _Progress:
    """Says what is measured next, how fast it went so far, and how long the rest will take."""

    def __init__(self, tokens: Sequence[int], others: int, console: Callable[[str], None]) -> None:
        """tokens: of each measurement. others: measurements at a speed of their own, of which no rest is reckoned."""
        self.left, self.of, self.others, self.console = sum(tokens), len(tokens) + others, others, console
        self.number, self.tokens, self.seconds = 0, 0, 0.0
        self._begun = time.monotonic()

    def begin(self, what: str) -> None:
        """Say it."""
        self.number += 1
        self._begun = time.monotonic()
        rest = (
            ""
            if self.others or not self.tokens
            else f", {format_duration(self.left * self.seconds / self.tokens)} left"
        )
        speed = f" ({self.tokens / self.seconds:,.0f} tokens/s{rest})" if self.tokens else ""
        self.console(f"measuring {self.number} of {self.of}, {what}{speed}")

    def end(self, tokens: int) -> None:
        """So many are measured now."""
        self.tokens, self.left = self.tokens + tokens, self.left - tokens
        self.seconds += time.monotonic() - self._begun


def compute_metrics(measured: Diagnostics) -> dict[str, float]:
    """What a run measures of its whole validation set, of this sample, under each measurement's prefix.

    Means over layers, heads and positions; what is undefined is left out.
    """
    found = {
        prefix + name: float(np.nanmean(values, dtype=np.float64))
        for prefix in measured.prefixes
        for name, source in SAMPLED.items()
        if (values := measured.arrays.get(prefix + source)) is not None and np.isfinite(values).any()
    }
    for prefix in measured.prefixes:
        own = {name.removeprefix(prefix): x for name, x in measured.arrays.items() if name.startswith(prefix)}
        found |= {prefix + name: value for name, value in lengths.compute_length_metrics(own).items()}
        for name in ("weight", "share"):
            first = measured.arrays.get(f"{prefix}sink/{name}")
            if first is not None and np.isfinite(first[..., 0]).any():
                found[f"{prefix}sink/{name}"] = float(np.nanmean(first[..., 0], dtype=np.float64))
    return found


def write_results(
    measured: Diagnostics, metrics: Mapping[str, float], sources: Mapping[str, DataSource], request: Request
) -> list[Path]:
    """The files of a diagnosis: arrays, facts, and each figure as PNG and SVG."""
    folder = request.folder
    folder.mkdir(parents=True, exist_ok=True)
    measured.save(folder / ARRAYS)
    facts = {
        "checkpoint": str(request.checkpoint),
        "command": format_command_line(),
        "data": {
            prefix or "trained": {
                "name": source.name,
                "fingerprint": source.fingerprint,
                "context_length": source.context_length,
                **source.info,
            }
            for prefix, source in sources.items()
        },
        "sequences": int(measured.arrays["sample"][0]),
        "maps": measured.arrays.get("maps/heads", np.empty(0)).tolist(),
        "metrics": dict(metrics),
        "versions": collect_environment(),
    }
    write_text(folder / FACTS, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    figures = draw_run_figures(measured.arrays, request.name)
    for name in FIGURE_NAMES:  # those of an earlier diagnosis would not be of this one's arrays
        for kind in ("png", "svg"):
            (folder / f"{name}.{kind}").unlink(missing_ok=True)
    drawn = [path for name, figure in figures.items() for path in save_figure(figure, folder / name)]
    return [folder / ARRAYS, folder / FACTS, *drawn]


def track(
    tracker: Tracker,
    cfg: RunConfig,
    metrics: Mapping[str, float],
    files: list[Path],
    source: DataSource,
    request: Request,
) -> None:
    """Log a diagnosis as a run of the MLflow experiment `diagnose`."""
    mixer, attention = cfg.model.mixer, cfg.model.attention
    parts = {"normaliser": attention.normaliser, "bias": attention.bias} if mixer.attends else {"mixer": mixer}
    versions = collect_environment()
    tags = {
        "kind": "diagnose",
        "checkpoint": str(request.checkpoint),
        "seed": str(cfg.seed),
        "git_sha": versions["git_sha"],
        **{name: type(part).__name__ for name, part in parts.items()},
        "position": type(cfg.model.position).__name__,
    }
    asked = {
        "diagnosed.data": source.name,
        "diagnosed.fingerprint": source.fingerprint,
        "diagnosed.sequences": str(request.sequences),
        "diagnosed.lengths": ",".join(map(str, (source.context_length, *request.lengths))),
    }
    try:
        run_id = tracker.start_run(request.folder.name, tags, asked, to_dict(cfg))
        tracker.log_files(run_id, files)
        tracker.finish(run_id, metrics, {}, step=cfg.train.steps)
    except TrackingError as error:
        raise UnfinishedError(
            f"measured into {request.folder}, but MLflow did not take it ({error}); give the same command again"
        ) from error


def format_table(metrics: Mapping[str, float], prefixes: list[str]) -> str:
    """The metrics in groups, one a line, with a column for each measurement."""
    names = sorted({name.removeprefix(_find_prefix(name, prefixes)) for name in metrics})
    head = ["trained", *(prefix.removesuffix("/") for prefix in prefixes if prefix)]
    lines = ["".join([" " * 28, *(f"{title:>12}" for title in head)])]
    group = ""
    for name in names:
        if name.partition("/")[0] != group:
            group = name.partition("/")[0]
            lines.append(group)
        values = (metrics.get(prefix + name) for prefix in prefixes)
        shown = ("-" if value is None else f"{value:.4g}" for value in values)
        lines.append("".join([f"  {name.partition('/')[2]:26}", *(f"{value:>12}" for value in shown)]))
    return "\n".join(lines)


def _find_prefix(name: str, prefixes: list[str]) -> str:
    return next((prefix for prefix in prefixes if prefix and name.startswith(prefix)), "")
