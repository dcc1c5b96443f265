"""Commands that measure a trained model: `lit-lazy evaluate`, `diagnose`, `lm-eval`."""

import argparse
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lit_lazy.command.options import CHANGES, command, make_eviction, prepare_process, print_metrics
from lit_lazy.support.checked_fields import Bounds, NonEmptyText
from lit_lazy.support.error_messages import naming

if TYPE_CHECKING:
    from lit_lazy.measure.lm_eval import BenchmarkResults


@command(
    "evaluate",
    "measure a trained model on its validation data",
    "checkpoint",
    "--import",
    {"--evaluations LIST": "measure these instead, for example 'Passkey(lengths=(512, 1024)), Int8()'"},
    "--threads",
    takes_overrides=True,
    epilog=CHANGES,
)
def evaluate_command(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure again the metrics that the run ended with, or the evaluations asked for. Creates nothing.

    Raises a one-line ValueError for a damaged checkpoint, if the data have changed since the training (which is not
    checked for evaluations: some need none of it), and for an evaluation that the model or its data do not support;
    DivergedError if a metric is not finite.
    """
    from lit_lazy.config.overrides import apply_overrides
    from lit_lazy.measure.evaluation import compute_size_metrics, measure_evaluation
    from lit_lazy.training import checkpoints
    from lit_lazy.training.check_before_run import check_evaluations
    from lit_lazy.training.execution_settings import select_training_device
    from lit_lazy.training.run import measure_model

    prepare_process(options)
    trained = checkpoints.load(options.checkpoint)
    cfg = checkpoints.change_settings(trained.cfg, overrides)
    module = trained if cfg.model == trained.cfg.model else checkpoints.change_model(trained, cfg)
    model = module.model.to(select_training_device())
    if options.evaluations is not None:
        cfg, _ = apply_overrides(cfg, [f"--evaluations={options.evaluations}"])
        check_evaluations(cfg, model)
        for evaluation in cfg.evaluations:
            print_metrics(measure_evaluation(evaluation, model, cfg.data))
        return 0
    source = checkpoints.load_data_for(options.checkpoint, trained, cfg.data)
    measured = measure_model(module, source, maps=None)
    print_metrics(measured.metrics | compute_size_metrics(model) | measured.diagnostics.scalars())
    return 0


MOST_TOKENS = 2**17
"""Maximum length of a sequence: longer ones would take very long without progress messages."""


@command(
    "diagnose",
    "measure and plot a trained model's attention: sinks, mass, sparsity, collapse",
    "checkpoint",
    "--import",
    {
        "--data EXPERIMENT": (
            "experiment whose validation data to use, a name or a .py file (default: the data of the training)",
            {"type": NonEmptyText},
        ),
        "--lengths 512,1024": (
            "further context lengths to measure at",
            {"type": list[Annotated[int, Bounds(ge=1, le=MOST_TOKENS)]]},
        ),
    },
    "--window",
    "--first",
    {
        "--layers 0,1": (
            "layers whose attention maps to save, counted from 0 (default: up to four, evenly spaced)",
            {"default": None},
        ),
        "--heads 0,1": (
            "heads whose attention maps to save, counted from 0 (default: the one with the largest share of its mass "
            "on the first key)",
            {"default": None},
        ),
        "--sequences N": ("maximum number of validation sequences (default 64)", {"default": 64}),
        "--rise NATS": "raise tau of each head from 0, at most to 4, until the loss is so much higher; for a model "
        "that was trained without thresholds and is changed by --model.attention.normaliser=Elastic",
        "--out FOLDER": "output folder (default: in --runs, one for each checkpoint and choice of options)",
    },
    "--threads",
    "--runs",
    takes_overrides=True,
    epilog=CHANGES,
)
def diagnose(options: argparse.Namespace, overrides: list[str]) -> int:
    from lit_lazy.measure.diagnostics import Maps
    from lit_lazy.report.diagnose_checkpoint import Request
    from lit_lazy.report.diagnose_checkpoint import diagnose as diagnose_checkpoint

    prepare_process(options)
    layers, heads = (None if chosen is None else tuple(chosen) for chosen in (options.layers, options.heads))
    same = {name: getattr(options, name) for name in ("checkpoint", "rise", "data", "sequences", "out", "runs")}
    lengths, eviction = tuple(options.lengths), make_eviction(options)
    maps = Maps(layers, heads)
    diagnose_checkpoint(Request(overrides=tuple(overrides), lengths=lengths, eviction=eviction, maps=maps, **same))
    return 0


@command(
    "lm-eval",
    "evaluate a trained model on standard benchmarks by lm-evaluation-harness",
    "checkpoint",
    "--import",
    {
        "--tasks piqa,boolq": "tasks of the harness (default: wikitext, lambada_openai, piqa, hellaswag, winogrande, "
        "arc_easy, arc_challenge, social_iqa, boolq)",
        "--task-folder FOLDER": "folder with task files, which take precedence over the harness's tasks of the same "
        "name",
        "--limit N": "maximum questions per task, for a trial",
        "--out FILE.json": "write the results there",
    },
    "--threads",
)
def lm_eval(options: argparse.Namespace, _rest: list[str]) -> int:
    import torch
    from rich.progress import Progress

    from lit_lazy.measure.lm_eval import TASKS, benchmark, find_tasks, load_tasks, require_text
    from lit_lazy.support.console import plain_console
    from lit_lazy.support.disk import check_writable_file, write_text
    from lit_lazy.support.provenance import collect_environment
    from lit_lazy.training import checkpoints
    from lit_lazy.training.execution_settings import select_training_device

    prepare_process(options)
    if options.out is not None:
        check_writable_file("--out", options.out)
    chosen = options.tasks or list(TASKS)
    manager = find_tasks(chosen, options.task_folder, "--tasks")
    module = checkpoints.load(options.checkpoint)
    checkpoints.require_same_tokenizer(options.checkpoint, module, module.cfg.data)
    with naming(f"checkpoint {str(options.checkpoint)!r}"):
        prompts = require_text(module.cfg.data, module.hparams["vocab_size"])
    tasks = load_tasks(chosen, manager, "--tasks")
    model = module.model.to(select_training_device())
    precision = torch.autocast(model.device.type, torch.bfloat16, enabled=module.cfg.train.precision == "bf16")
    console = plain_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("requests", total=None)
        count = partial(bar.update, shown)
        found = benchmark(model, prompts, tasks, options.limit, precision, lambda n, of: count(completed=n, total=of))
    print_benchmarks(found)
    result = found.to_json() | {"checkpoint": str(options.checkpoint), "environment": collect_environment()}
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(options.out, json.dumps(result, indent=1))
    print(log_benchmarks(options.checkpoint, found.metrics(), result, limited=options.limit is not None))
    return 0


def log_benchmarks(checkpoint: Path, metrics: Mapping[str, float], result: Mapping[str, Any], limited: bool) -> str:
    """Log benchmark metrics to the run of the checkpoint's folder; returns a one-line description of what was done.

    Logs nothing for a checkpoint outside a run folder or if only part of the questions was used (limited).
    """
    from lit_lazy.tracking.store_address import TrackingError, default_uri, read_run_address, sqlite_file

    if limited:
        return "not logged to MLflow: with --limit these are not benchmark results"
    folder = checkpoint.absolute().parent
    run_id, _ = read_run_address(folder)
    if not run_id:
        return f"not logged to MLflow: {folder} belongs to no run"
    # runs/train-NAME/KEY, or runs/ABLATION/cells/KEY
    runs = next((above for above in folder.parents[1:3] if (above / "mlflow.db").exists()), folder.parents[1])
    uri = default_uri(runs)
    if (file := sqlite_file(uri)) is not None and not file.exists():
        return f"not logged to MLflow: {os.fspath(file)} does not exist; set MLFLOW_TRACKING_URI"
    from lit_lazy.tracking.tracker import Tracker

    try:
        tracker = Tracker(uri, folder.parent.name)
        tracker.update(run_id, metrics=metrics, files={"lm-eval.json": json.dumps(result, indent=1).encode()})
    except TrackingError as error:
        return f"not logged to MLflow: {error}"
    return f"logged to MLflow with run {run_id}"


def print_benchmarks(found: "BenchmarkResults") -> None:
    """Print a table: the standard columns first, then the other metrics of the tasks."""
    rows = [
        (column.title, column.task, column.metric, value, found.standard_error(column))
        for column, value in found.columns()
    ]
    known = {(task, metric) for _, task, metric, _, _ in rows}
    rows += [("", *key, value, None) for key, value in sorted(found.scores.items()) if key not in known]
    for title, task, metric, value, error in rows:
        spread = "" if error is None else f" +- {error:.4f}"
        n, version = found.samples.get(task, 0), found.versions.get(task, "?")
        print(f"{title:9} {task:15} {metric:16} {value:10.4f}{spread:10}  n {n:,}, version {version}")
    if found.average is not None:
        print(f"{'average':42} {found.average:10.4f}            of the eight accuracies")
    facts = found.facts
    prefix = facts["prefix_token"]
    cut = f"{facts['requests_cut_on_the_left']:,} of {facts['requests']:,} requests cut on the left"
    harness = f"{facts['harness']}; prefix token {prefix['text']!r} ({prefix['id']})"
    print(f"{harness}; {cut} at {facts['context_length']:,} tokens")
