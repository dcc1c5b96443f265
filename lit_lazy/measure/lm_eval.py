"""The field's benchmarks: lm-evaluation-harness on a model in this process.

Prompts, metrics and versions of tasks are the harness's own; how the model is asked is in `harness/asked.py`. The
harness is an extra, and takes seconds to import: only what asks a model, or looks for a task, does so.
"""

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_lazy.config.evaluation import Evaluation
from lit_lazy.data import DataConfig
from lit_lazy.data.pipeline.documents import go_offline_unless_hub_answers, import_datasets_quietly
from lit_lazy.data.pipeline.tokeniser import Tokenizer
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.checks import require, require_whole
from lit_lazy.support.errors import iter_causes, one_line

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from lit_lazy.measure.harness.lm_eval_adapter import Count

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
"""The tasks of the field's tables, and the folders of the harness that hold them: it has 14,000 files in all."""


@dataclass(frozen=True)
class BenchmarkColumn:
    """A column of the field's tables."""

    title: str
    task: str
    metric: str
    is_accuracy: bool = True


COLUMNS = (
    BenchmarkColumn("Wiki ppl", "wikitext", "word_perplexity", is_accuracy=False),
    BenchmarkColumn("LMB ppl", "lambada_openai", "perplexity", is_accuracy=False),
    BenchmarkColumn("LMB", "lambada_openai", "acc"),
    BenchmarkColumn("PIQA", "piqa", "acc"),
    BenchmarkColumn("Hella", "hellaswag", "acc_norm"),
    BenchmarkColumn("Wino", "winogrande", "acc"),
    BenchmarkColumn("ARC-e", "arc_easy", "acc"),
    BenchmarkColumn("ARC-c", "arc_challenge", "acc_norm"),
    BenchmarkColumn("SIQA", "social_iqa", "acc"),
    BenchmarkColumn("BoolQ", "boolq", "acc"),
)
"""In their usual order. Perplexities are by word: of WikiText per word of the text, of LAMBADA of the last word."""


def average_accuracy(scores: Mapping[tuple[str, str], float]) -> float | None:
    """Mean of the eight accuracies, by task and metric; None where one is missing."""
    wanted = [(column.task, column.metric) for column in COLUMNS if column.is_accuracy]
    return sum(scores[each] for each in wanted) / len(wanted) if all(each in scores for each in wanted) else None


@dataclass(frozen=True)
class BenchmarkResults:
    """What some tasks gave."""

    scores: dict[tuple[str, str], float]
    """By task and metric."""
    samples: dict[str, int]
    """Questions of each task."""
    versions: dict[str, str]
    """Of each task."""
    facts: dict[str, Any] = field(default_factory=dict)
    """How the model was asked."""

    @property
    def average(self) -> float | None:
        """Mean of the eight accuracies; None unless all were measured."""
        return average_accuracy(self.scores)

    def standard_error(self, column: BenchmarkColumn) -> float | None:
        """Standard error of an accuracy by the number of its questions; of a perplexity none is given."""
        n, p = self.samples.get(column.task, 0), self.scores.get((column.task, column.metric))
        return math.sqrt(p * (1 - p) / (n - 1)) if column.is_accuracy and p is not None and n > 1 else None

    def columns(self) -> list[tuple[BenchmarkColumn, float]]:
        """The columns of the field's tables that were measured, and their values."""
        found = ((column, self.scores.get((column.task, column.metric))) for column in COLUMNS)
        return [(column, value) for column, value in found if value is not None]

    def metrics(self) -> dict[str, float]:
        """Names and values as a run logs them."""
        found = {f"lm-eval/{task}/{metric}": value for (task, metric), value in self.scores.items()}
        return found if self.average is None else found | {"lm-eval/average": self.average}

    def to_json(self) -> dict[str, Any]:
        """All of it, plain."""
        tasks = {
            task: {
                "version": version,
                "samples": self.samples.get(task, 0),
                "metrics": {metric: value for (of, metric), value in self.scores.items() if of == task},
            }
            for task, version in self.versions.items()
        }
        columns = [
            {"title": column.title, "task": column.task, "metric": column.metric, "value": value}
            | {"standard_error": self.standard_error(column)}
            for column, value in self.columns()
        ]
        return {"columns": columns, "average": self.average, "tasks": tasks, **self.facts}


def find_tasks(names: Sequence[str], folder: Path | None = None, option: str = "tasks") -> "TaskManager":
    """A manager that knows these tasks. folder: with task files of the user's, which come before the harness's.

    option: by which they were named, for errors. Raises ValueError, in one line, for a task that does not exist, and
    where the harness is missing. Loads no data.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("lm-eval needs the package lm_eval; pip install 'lit-lazy[lm-eval]'") from None
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    shipped = Path(lm_eval.__file__).parent / "tasks"
    # Of two tasks of one name the later folder's counts.
    folders: list[str | Path] = [*dict.fromkeys(shipped / TASKS[name] for name in names if name in TASKS)]
    folders += [folder] if folder else []
    try:
        manager = TaskManager(include_defaults=False, include_path=folders)
    except Exception as error:  # whatever a user's files lead to
        raise ValueError(f"task folder {str(folder)!r}: cannot be read ({one_line(error)})") from None
    for name in names:
        if name not in manager.all_subtasks:
            own = sorted({*manager.all_subtasks} - {*TASKS})
            known = ", ".join([*TASKS, *own])
            raise ValueError(f"{option}={name!r}: no such task; known are {known}, and those of a task folder")
    return manager


def load_tasks(names: Sequence[str], manager: "TaskManager", option: str = "tasks") -> list[Any]:
    """The tasks with their data, downloaded where the cache lacks them. Raises ValueError, in one line.

    option: by which they were named, for errors.
    """
    import_datasets_quietly()
    go_offline_unless_hub_answers()
    tasks = []
    for name in names:
        try:
            tasks.append(manager.load([name])["tasks"][name])
        except Exception as error:  # of the harness, of datasets, of the network
            why = next((one_line(cause) for cause in iter_causes(error) if isinstance(cause, OSError)), one_line(error))
            raise ValueError(
                f"{option}={name!r}: its data cannot be had ({why}); check the network, or leave the task out"
            ) from None
    return tasks


def benchmark(
    model: DecoderLM,
    tokenizer: Tokenizer,
    tasks: Sequence[Any],
    limit: int | None = None,
    autocast: AbstractContextManager[object] | None = None,
    count: "Count" = lambda _done, _total: None,
) -> BenchmarkResults:
    """The tasks' metrics of a model, where it is. limit: questions of each task, at most.

    autocast: the precision of the model's passes.
    """
    import lm_eval

    from lit_lazy.measure.harness.lm_eval_adapter import LmEvalAdapter

    asked = LmEvalAdapter(model, tokenizer, autocast, count)
    by_name = {task.config.task: task for task in tasks}
    for task in tasks:
        task.set_config(key="num_fewshot", value=0)
    was_training = model.training
    model.eval()
    try:
        # Not simple_evaluate: it seeds this process, and asks pip for every package.
        loaded: Any = {"tasks": by_name, "groups": {}, "group_map": {}}
        found: Any = lm_eval.evaluate(asked, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    finally:
        model.train(was_training)
    scores = {
        (task, name.partition(",")[0]): float(value)
        for task, values in found["results"].items()
        for name, value in values.items()
        if "," in name and not name.partition(",")[0].endswith("_stderr") and isinstance(value, int | float)
    }
    prefix = asked.prefix_token_id
    facts = {
        "harness": f"lm_eval {version('lm_eval')}",
        "limit": limit,
        "context_length": asked.max_length,
        "prefix_token": {"id": prefix, "text": "".join(tokenizer.decode([prefix]))},
        "requests": asked.requests,
        "requests_cut_on_the_left": asked.cut,
    }
    return BenchmarkResults(
        scores,
        {task: counts["effective"] for task, counts in found["n-samples"].items()},
        {task: str(found["versions"][task]) for task in by_name},
        facts,
    )


def require_tokenizer(data: DataConfig, vocab_size: int) -> Tokenizer:
    """What turns text into the tokens of a model of these data. Raises ValueError where that is not to be had."""
    tokenizer = data.load_tokenizer()
    if tokenizer is None:
        raise ValueError(
            f"its data ({type(data).__name__}) are no text, so that it can read none; give a model that was trained on "
            "text"
        )
    if tokenizer.vocab_size != vocab_size:
        raise ValueError(
            f"reads {vocab_size} tokens, and its tokenizer has {tokenizer.vocab_size} now; give it the one of its "
            "training"
        )
    return tokenizer


@dataclass(frozen=True)
class LmEval(Evaluation):
    """Benchmarks of lm-evaluation-harness, which needs `pip install 'lit-lazy[lm-eval]'`; in fp32."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Of the harness, or of the task folder."""
    limit: int | None = None
    """Questions of each task, at most; None for all."""
    task_folder: str | None = None
    """Folder with task files, which come before the harness's own of the same name; their content is in the key."""

    def __post_init__(self) -> None:
        require(len(self.tasks) > 0, "LmEval.tasks", self.tasks, "needs at least one")
        if self.limit is not None:
            require_whole("LmEval.limit", self.limit, 1)

    def files(self) -> list[Path]:
        """All in the task folder."""
        if self.task_folder is None:
            return []
        found = Path(self.task_folder).rglob("*")
        return sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts)

    def check(self, model: DecoderLM, data: DataConfig) -> None:
        """Raise ValueError where data are no text, or harness, a task or its data are missing; these are downloaded."""
        require_tokenizer(data, model.embedding.num_embeddings)
        folder = self.task_folder
        require(folder is None or Path(folder).is_dir(), "LmEval.task_folder", folder, "is no folder; give one")
        self._load_tasks()

    def measure(self, model: DecoderLM, data: DataConfig) -> dict[str, float]:
        """`lm-eval/piqa/acc` and so on; of all eight accuracies `lm-eval/average`, too."""
        tokenizer = require_tokenizer(data, model.embedding.num_embeddings)
        return benchmark(model, tokenizer, self._load_tasks(), self.limit).metrics()

    def _load_tasks(self) -> list[Any]:
        return _load_tasks_once(self.tasks, self.task_folder)


@functools.cache
def _load_tasks_once(names: tuple[str, ...], folder: str | None) -> list[Any]:
    """Every row of an ablation is checked, with the same tasks."""
    return load_tasks(names, find_tasks(names, Path(folder) if folder is not None else None))
