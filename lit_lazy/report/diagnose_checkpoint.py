"""Measure a checkpoint's heads and hidden states into a folder and an MLflow run: `lit-lazy diagnose`."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from lit_lazy.attention import Eviction
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import to_dict
from lit_lazy.config.user_files import load_experiment
from lit_lazy.data import DataConfig, DataSource
from lit_lazy.figures.canvas import save_figures
from lit_lazy.figures.diagnostics import RUN_FIGURES, draw_run_figures
from lit_lazy.measure import lengths
from lit_lazy.measure.attention_metrics import FIRST_KEY_MIN_POSITION
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import SAMPLE, STRONGEST, Maps, load_at_length, measure, sample_validation
from lit_lazy.measure.raise_thresholds import raise_thresholds
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.console import format_duration
from lit_lazy.support.disk import check_writable_folder, write_text
from lit_lazy.support.error_messages import UnfinishedError, naming
from lit_lazy.support.names_to_paths import find, join_name
from lit_lazy.support.provenance import collect_environment
from lit_lazy.support.secrets import format_command_line
from lit_lazy.tracking.check_databases import check_store
from lit_lazy.tracking.store_address import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training import checkpoints
from lit_lazy.training.execution_settings import select_training_device
from lit_lazy.training.head_monitor import STATE_KEY, History, make_history_arrays, read_history
from lit_lazy.training.module import LitLM

ARRAYS, FACTS = "diagnostics.npz", "diagnostics.json"


@dataclass(frozen=True)
class Request:
    """The options of `lit-lazy diagnose`."""

    checkpoint: Path
    overrides: tuple[str, ...] = ()
    """Settings of the model and of its data to change, as `--dotted.path=value`; weights stay where they match."""
    rise: float | None = None
    """Raise tau of each head, from 0, until the loss of the sample is so many nats above that at 0."""
    data: str | None = None
    """Experiment whose data are measured; None for the training data."""
    lengths: tuple[int, ...] = ()
    """Further context lengths to measure at."""
    eviction: Eviction | None = None
    """Eviction of a cache with which the losses are also measured, at every length; None for no such measurement."""
    maps: Maps = STRONGEST
    sequences: int = SAMPLE
    out: Path | None = None
    """Folder for the results; None for a folder in `runs`."""
    runs: Path = Path("runs")

    @property
    def name(self) -> str:
        """Names of the checkpoint and of other data, and a digest of all that decides the results."""
        path = self.checkpoint.resolve()
        data = f"-{Path(self.data).stem}" if self.data else ""
        deciding = repr(replace(self, checkpoint=path, out=None, runs=Path()))
        return f"{path.parent.name}-{path.stem}{data}-{hashlib.sha256(deciding.encode()).hexdigest()[:6]}"

    @property
    def changes(self) -> list[str]:
        """What is changed before the measurement, as options."""
        return [*self.overrides, *([] if self.rise is None else [f"--rise={self.rise:g}"])]

    @property
    def folder(self) -> Path:
        """The folder of the results."""
        return self.out or join_name(self.runs, f"diagnose-{self.name}")


def diagnose(request: Request, console: Callable[[str], None] = print) -> Diagnostics:
    """Measure a checkpoint, its model at init, and the checkpoint at other lengths; write, log and print the results.

    With overrides the changed model is measured, and the checkpoint's beside it in place of the model at init. An
    imported model, or one that continues the training of another, has none beside it. Raises a one-line ValueError,
    before creating anything, if the checkpoint, a layer, a head, the data or a length is invalid; UnfinishedError if
    MLflow does not store the results, which then are in the folder.
    """
    trained = checkpoints.load(request.checkpoint)
    cfg = trained.cfg
    if request.data is not None:
        cfg = replace(cfg, data=load_experiment(find("experiments", request.data)).data)
    cfg = checkpoints.change_settings(cfg, request.overrides)
    same = cfg.model == trained.cfg.model and request.rise is None
    module = trained if same else checkpoints.change_model(trained, cfg)
    request.maps.check(module.model, "--")
    module.model.new_cache(request.eviction)
    history = read_checkpoint_history(request.checkpoint) if same else {}
    sources = load_sources(request, trained, cfg.data, module.model)
    check_writable_folder("--runs", request.runs)
    check_writable_folder("--out", request.folder)
    uri = default_uri(request.runs)
    check_store(uri)

    if request.rise is not None:
        console(f"raising the threshold of each head until the loss is {request.rise:g} nats higher")
        batch = sample_validation(sources[""], request.sequences)[0]
        raise_thresholds(module.model.to(select_training_device()), batch, request.rise)
    reference = build_reference(request.checkpoint, trained) if same else {"before/": trained}
    measured = measure_all({"": module} | reference, sources, history, request, console)
    metrics = measured.metrics()  # under each measurement's prefix: means over layers, heads and positions
    for prefix in measured.prefixes:
        arrays = {name.removeprefix(prefix): x for name, x in measured.arrays.items() if name.startswith(prefix)}
        metrics |= {prefix + name: value for name, value in lengths.compute_length_metrics(arrays).items()}
    replaced = ", in place of an earlier diagnosis" if (request.folder / FACTS).exists() else ""
    files = write_results(measured, metrics, sources, request)
    sample = f"means over {measured.arrays['sample'][0]} of {len(sources[''].validation)} validation sequences"
    of_rows = f", for sink/first_key_weight over query rows from position {FIRST_KEY_MIN_POSITION} on"
    how = f"`lit-lazy evaluate` takes loss/val over all{of_rows if 'sink/weight' in measured.arrays else ''}"
    console(f"\n{format_table(metrics, measured.prefixes)}\n\n{sample}; {how}")
    console(f"\nfiles: {request.folder} ({', '.join(file.name for file in files)}){replaced}")
    track(uri, cfg, metrics, files, sources[""], request)
    return measured


def build_reference(checkpoint: Path, trained: LitLM) -> dict[str, LitLM]:
    """The model at init as `init/`; {} if the training began from another model's weights."""
    begins_elsewhere = trained.cfg.init_from or not read_checkpoint(checkpoint)["global_step"]
    return {} if begins_elsewhere else {"init/": LitLM(**trained.hparams)}


def read_checkpoint_history(checkpoint: Path) -> History:
    """What was learned by step, as recorded during training. Raises a one-line ValueError for any other content."""
    try:
        return read_history(checkpoints.read_callback_state(checkpoint, STATE_KEY))
    except (AttributeError, TypeError, ValueError):
        what = "the learned parameters recorded during training are damaged"
        raise ValueError(f"checkpoint {str(checkpoint)!r}: {what}; train again") from None


def load_sources(request: Request, trained: LitLM, data: DataConfig, model: DecoderLM) -> dict[str, DataSource]:
    """The data sources by the prefix of their arrays, "" and `L<length>/`.

    data: those of the checkpoint `trained`, perhaps with changes; model: what is measured. Raises a one-line ValueError
    if the data are unavailable or do not fit the model.
    """
    origin = f"checkpoint {str(request.checkpoint)!r}" if request.data is None else f"--data {request.data!r}"
    source = checkpoints.load_data_for(request.checkpoint, trained, data, origin)
    with naming(origin):
        model.check_length(source.context_length)
    found = {"": source}
    for length in request.lengths:
        with naming(f"--lengths {length}"):
            own = length == source.context_length
            found[f"L{length}/"] = source if own else load_at_length(model, data, length)
    return found


def measure_all(
    modules: Mapping[str, LitLM],
    sources: Mapping[str, DataSource],
    history: History,
    request: Request,
    console: Callable[[str], None],
) -> Diagnostics:
    """Measure each module on the first source under its own prefix, and the first module at other lengths.

    modules: the model of interest as "", then perhaps it before its training (`init/`) or a change (`before/`). Each
    measurement takes seconds to minutes and is announced on the console.
    """
    device = select_training_device()
    model, *_ = models = [module.model.to(device) for module in modules.values()]
    measured_by = dict(zip(modules, models, strict=True))
    # The model of interest comes first, so that a failure stops the diagnosis before the other measurements.
    order = dict.fromkeys(modules, sources[""]) | {prefix: sources[prefix] for prefix in sources if prefix}
    samples = {prefix: sample_validation(source, request.sequences) for prefix, source in order.items()}
    main = "the changed model" if "before/" in modules else "the trained model"
    titles = {"init/": "the untrained model", "before/": "the model before the change"}
    evictions = len(sources) if request.eviction else 0
    progress = _Progress([sample[0]["tokens"].numel() for sample in samples.values()], evictions, console)
    parts = {}
    for prefix, sample in samples.items():
        n, length = sample[0]["tokens"].shape
        measured = measured_by.get(prefix, model)
        progress.begin(f"{titles.get(prefix, main)}: {n} sequences of {length} tokens")
        maps = request.maps if not prefix else None
        arrays = dict(measure(measured, sample, maps, request.sequences, progress.advance).arrays)
        arrays |= lengths.compute_length_arrays(measured, length)
        progress.end()
        if not prefix:
            arrays |= make_history_arrays(history)
        if request.eviction is not None and measured is model:
            cached = f"the first {request.eviction.first} and {request.eviction.window} newest tokens"
            progress.begin(f"the same with {cached} in its cache, token by token")
            arrays |= lengths.compute_streaming_arrays(model, sample[0], request.eviction)
        parts[prefix] = Diagnostics(arrays)
    return Diagnostics.merge(parts)


REPORT_SECONDS = 20.0
"""At least between two lines on a measurement that goes on."""


class _Progress:
    """Announces each measurement, and where it is, with the speed so far and the remaining time."""

    def __init__(self, tokens: Sequence[int], others: int, console: Callable[[str], None]) -> None:
        """tokens: tokens of each measurement. others: number of measurements of another speed; if there are any, no
        remaining time is estimated."""
        self.left, self.total, self.others, self.console = sum(tokens), len(tokens) + others, others, console
        self.number, self.tokens, self.seconds, self._start = 0, 0, 0.0, 0.0

    def begin(self, measurement: str) -> None:
        self.number += 1
        self._report(measurement)

    def advance(self, tokens: int) -> None:
        """Count tokens of a measurement that goes on."""
        self.tokens, self.left = self.tokens + tokens, self.left - tokens
        if time.monotonic() - self._start > REPORT_SECONDS:
            self.end()
            self._report(f"{self.tokens:,} of {self.tokens + self.left:,} tokens done")

    def end(self) -> None:
        self.seconds += time.monotonic() - self._start

    def _report(self, text: str) -> None:
        self._start = time.monotonic()
        speed = ""
        if self.tokens and self.seconds:
            left = format_duration(self.left * self.seconds / self.tokens)
            speed = f" ({self.tokens / self.seconds:,.0f} tokens/s{'' if self.others else f', {left} left'})"
        self.console(f"measuring {self.number} of {self.total}, {text}{speed}")


def write_results(
    measured: Diagnostics, metrics: Mapping[str, float], sources: Mapping[str, DataSource], request: Request
) -> list[Path]:
    """Write the files of a diagnosis: arrays, facts, and each figure as PNG and SVG."""
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
        "changes": request.changes,
        "metrics": dict(metrics),
        "versions": collect_environment(),
    }
    write_text(folder / FACTS, json.dumps(facts, indent=1, allow_nan=False) + "\n")
    figures = draw_run_figures(measured.arrays, request.name)
    for draw in RUN_FIGURES:  # remove figures of an earlier diagnosis
        for kind in ("png", "svg"):
            (folder / f"{draw.__name__}.{kind}").unlink(missing_ok=True)
    return [folder / ARRAYS, folder / FACTS, *save_figures(figures, folder)]


def track(
    uri: str, cfg: RunConfig, metrics: Mapping[str, float], files: list[Path], source: DataSource, request: Request
) -> None:
    """Log a diagnosis as a run of the MLflow experiment `diagnose`."""
    tracker = Tracker(uri, "diagnose")
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
    params = {
        "diagnosed.data": source.name,
        "diagnosed.fingerprint": source.fingerprint,
        "diagnosed.sequences": str(request.sequences),
        "diagnosed.lengths": ",".join(map(str, (source.context_length, *request.lengths))),
    }
    try:
        run_id = tracker.create_run(request.folder.name, tags)
        tracker.log_config(run_id, params, to_dict(cfg))
        contents = {file.name: file.read_bytes() for file in files}
        end = {"state": "complete"}
        tracker.update(run_id, "FINISHED", metrics=metrics, step=cfg.train.steps, tags=end, files=contents)
    except TrackingError as error:
        raise UnfinishedError(
            f"results are in {request.folder}, but MLflow did not store them ({error}); run the same command again"
        ) from error


def format_table(metrics: Mapping[str, float], prefixes: list[str]) -> str:
    """The metrics in groups, one per line, with a column for each measurement."""
    others = [prefix for prefix in prefixes if prefix]
    names = sorted({name.removeprefix(next(filter(name.startswith, others), "")) for name in metrics})
    head = ["changed" if "before/" in prefixes else "trained", *(prefix.removesuffix("/") for prefix in others)]
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
