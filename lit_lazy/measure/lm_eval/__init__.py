"""Standard benchmarks: lm-evaluation-harness on a model in this process.

Prompts, metrics and task versions are the harness's; `adapter.py` adapts the model. The harness is an
optional dependency and takes seconds to import, so only functions that run or look up a task import it.
"""

import functools
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.pipeline.hub import go_offline_unless_hub_answers, import_datasets_quietly
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Prompts
from lit_lazy.support.checked_fields import Bounds, PositiveInt, require
from lit_lazy.support.error_messages import iter_causes, one_line

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lit_lazy.measure.lm_eval.adapter import Count

TASKS = {
    "wikitext": "wikitext",
    "lambada_openai": "lambada",
    "piqa": "piqa",
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "arc_easy": "arc",
    "arc_challenge": "arc",
    "social_iqa": "siqa",
    "boolq": "super_glue/boolq",
}
"""Tasks of the usual tables -> their folders in the harness, which has 14,000 files in total."""


class BenchmarkColumn(NamedTuple):
    title: str
    task: str
    metric: str

    @property
    def key(self) -> tuple[str, str]:
        return self.task, self.metric

    @property
    def is_accuracy(self) -> bool:
        return "perplexity" not in self.metric


COLUMNS = (
    BenchmarkColumn("Wiki ppl", "wikitext", "word_perplexity"),
    BenchmarkColumn("LMB ppl", "lambada_openai", "perplexity"),
    BenchmarkColumn("LMB", "lambada_openai", "acc"),
    BenchmarkColumn("PIQA", "piqa", "acc"),
    BenchmarkColumn("Hella", "hellaswag", "acc_norm"),
    BenchmarkColumn("Wino", "winogrande", "acc"),
    BenchmarkColumn("ARC-e", "arc_easy", "acc"),
    BenchmarkColumn("ARC-c", "arc_challenge", "acc_norm"),
    BenchmarkColumn("SIQA", "social_iqa", "acc"),
    BenchmarkColumn("BoolQ", "boolq", "acc"),
)
"""In the usual order. Perplexities are by word: for WikiText per word of the text, for LAMBADA of the last word."""


@dataclass(frozen=True)
class BenchmarkResults:
    """Results of some tasks."""

    scores: dict[tuple[str, str], float]
    """By task and metric."""
    samples: dict[str, int]
    """Questions of each task."""
    versions: dict[str, str]
    """Version of each task."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Settings and counts of the requests."""

    @property
    def average(self) -> float | None:
        """Mean of the eight accuracies; None unless all were measured."""
        keys = [column.key for column in COLUMNS if column.is_accuracy]
        return sum(self.scores[key] for key in keys) / len(keys) if self.scores.keys() >= {*keys} else None

    def standard_error(self, column: BenchmarkColumn) -> float | None:
        """Standard error of an accuracy by its number of questions; None for a perplexity."""
        n, p = self.samples.get(column.task, 0), self.scores.get(column.key)
        return math.sqrt(p * (1 - p) / (n - 1)) if column.is_accuracy and p is not None and n > 1 else None

    def columns(self) -> list[tuple[BenchmarkColumn, float]]:
        """The measured columns of the usual tables, and their values."""
        return [(column, self.scores[column.key]) for column in COLUMNS if column.key in self.scores]

    def metrics(self) -> dict[str, float]:
        found = {f"lm-eval/{task}/{metric}": value for (task, metric), value in self.scores.items()}
        return found if self.average is None else found | {"lm-eval/average": self.average}

    def to_json(self) -> dict[str, Any]:
        tasks = {
            task: {
                "version": version,
                "samples": self.samples.get(task, 0),
                "metrics": {metric: value for (name, metric), value in self.scores.items() if name == task},
            }
            for task, version in self.versions.items()
        }
        columns = [
            {**column._asdict(), "value": value, "standard_error": self.standard_error(column)}
            for column, value in self.columns()
        ]
        return {"columns": columns, "average": self.average, "tasks": tasks, **self.facts}


def find_tasks(names: Sequence[str], folder: Path | None = None, option: str = "tasks") -> "TaskManager":
    """A manager of these tasks, without their data. folder: custom task files, which override the harness's.

    option: name of the option in errors. Raises a one-line ValueError if a task does not exist or the harness is
    not installed.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("lm-eval needs the package lm_eval; pip install 'lit-lazy[lm-eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    shipped = Path(lm_eval.__file__).parent / "tasks"
    # The later folder overrides tasks of the same name.
    folders: list[str | Path] = [*dict.fromkeys(shipped / TASKS[name] for name in names if name in TASKS)]
    folders += [folder] if folder else []
    try:
        manager = TaskManager(include_defaults=False, include_path=folders)
    except Exception as error:  # custom files may raise anything
        raise ValueError(f"task folder {str(folder)!r}: cannot be read ({one_line(error)})") from None
    for name in names:
        if name not in manager.all_subtasks:
            custom = sorted({*manager.all_subtasks} - {*TASKS})
            known = ", ".join([*TASKS, *custom])
            raise ValueError(f"{option}={name!r}: no such task; known are {known}, and those of a task folder")
    return manager


def load_tasks(names: Sequence[str], manager: "TaskManager", option: str = "tasks") -> list[Any]:
    """Load tasks with their data, downloading what is not cached. option: name of the option in errors.

    Raises a one-line ValueError if a task's data cannot be loaded.
    """
    import_datasets_quietly()
    go_offline_unless_hub_answers()
    tasks = []
    for name in names:
        try:
            tasks.append(manager.load([name])["tasks"][name])
        except Exception as error:  # from the harness, datasets or the network
            why = next((one_line(cause) for cause in iter_causes(error) if isinstance(cause, OSError)), one_line(error))
            problem = f"{option}={name!r}: its data cannot be loaded ({why})"
            raise ValueError(f"{problem}; check the network, or leave the task out") from None
    return tasks


def benchmark(
    model: DecoderLM,
    prompts: Prompts,
    tasks: Sequence[Any],
    limit: int | None = None,
    autocast: AbstractContextManager[object] | None = None,
    count: "Count" = lambda _done, _total: None,
) -> BenchmarkResults:
    """Results of a model on its device. limit: maximum number of questions per task.

    autocast: context of the model's forward passes. count: called with the done and the total number of requests.
    """
    import lm_eval

    from lit_lazy.measure.lm_eval.adapter import LmEvalAdapter

    adapter = LmEvalAdapter(model, prompts, autocast, count)
    by_name = {task.config.task: task for task in tasks}
    for task in tasks:
        if task.config.task in TASKS:  # a user's own says how many
            task.set_config(key="num_fewshot", value=0)
    was_training = model.training
    model.eval()
    try:
        # Not simple_evaluate, which seeds this process and lists all packages with pip.
        loaded: Any = {"tasks": by_name, "groups": {}, "group_map": {}}
        found: Any = lm_eval.evaluate(adapter, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    finally:
        model.train(was_training)
    scores = {
        (task, name.removesuffix(",none").replace(",", "/")): float(value)  # METRIC/FILTER
        for task, values in found["results"].items()
        for name, value in values.items()
        if "," in name and not name.partition(",")[0].endswith("_stderr") and isinstance(value, int | float)
    }
    prefix = adapter.prefix_token_id
    facts = {
        "harness": f"lm_eval {version('lm_eval')}",
        "limit": limit,
        "context_length": adapter.max_length,
        "prefix_token": {"id": prefix, "text": "".join(adapter.text.decode([prefix]))},
        "requests": adapter.requests,
        "requests_cut_on_the_left": adapter.cut,
    }
    return BenchmarkResults(
        scores,
        {task: counts["effective"] for task, counts in found["n-samples"].items()},
        {task: str(found["versions"][task]) for task in by_name},
        facts,
    )


def require_text(data: DataConfig, vocab_size: int) -> Prompts:
    """Prompts of a model's data. Raises ValueError for data without text, or with another size of vocabulary."""
    prompts = Prompts(data, vocab_size)
    if prompts.tokenizer is None:
        raise ValueError(f"its data ({type(data).__name__}) is not text; give a model that was trained on text")
    return prompts


@dataclass(frozen=True)
class LmEval(Evaluation):
    """Benchmarks of lm-evaluation-harness, which needs `pip install 'lit-lazy[lm-eval]'`; in fp32."""

    tasks: Annotated[tuple[str, ...], Bounds(min_length=1)] = tuple(TASKS)
    """Tasks of the harness or of the task folder."""
    limit: PositiveInt | None = None
    """Maximum number of questions per task; None for all."""
    task_folder: str | None = None
    """Folder with custom task files, which override the harness's tasks; their content is part of the key."""

    def files(self) -> list[Path]:
        """All files in the task folder."""
        if self.task_folder is None:
            return []
        found = Path(self.task_folder).rglob("*")
        return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Download the tasks' data. Raises ValueError if the data is not text, or harness, task or data are missing."""
        require_text(data, model.embedding.num_embeddings)
        folder = self.task_folder
        require(folder is None or Path(folder).is_dir(), "LmEval.task_folder", folder, "must be a folder")
        _load_tasks_once(self.tasks, folder)

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`lm-eval/piqa/acc` and so on; `lm-eval/average` if all eight accuracies are measured."""
        prompts = require_text(data, model.embedding.num_embeddings)
        return benchmark(model, prompts, _load_tasks_once(self.tasks, self.task_folder), self.limit).metrics()


@functools.cache
def _load_tasks_once(names: tuple[str, ...], folder: str | None) -> list[Any]:
    """Cached, as every row of an ablation checks the same tasks."""
    return load_tasks(names, find_tasks(names, Path(folder) if folder is not None else None))
