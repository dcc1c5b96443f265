"""The field's benchmarks: lm-evaluation-harness on a model in this process.

Prompts, metrics and versions of tasks are the harness's own; what is ours is how the model is asked. Contexts have no
token put before them, as by the harness's default; an empty one is the prefix token: the token that begins documents
where the training text had one, else the one that separates them. A context that does not fit is cut on its left, as
the harness does, and counted.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_lazy.data.documents import offline_unless_the_hub_answers, quiet_datasets
from lit_lazy.data.tokeniser import Tokenizer
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.support.errors import causes, one_line

try:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise ValueError("lm-eval needs the package lm_eval; pip install 'lit-lazy[lm-eval]'") from None

TOKENS_AT_ONCE = 8192
"""Tokens of a forward pass, unless a single sequence is longer."""
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

Count = Callable[[int, int], object]
"""Takes note of progress: requests that are answered, and requests in all, of a task's kind of request."""


def average(scores: Mapping[tuple[str, str], float]) -> float | None:
    """Mean of the eight accuracies, by task and metric; None where one is missing."""
    wanted = [(column.task, column.metric) for column in COLUMNS if column.is_accuracy]
    return sum(scores[each] for each in wanted) / len(wanted) if all(each in scores for each in wanted) else None


@dataclass(frozen=True)
class Benchmarks:
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
        return average(self.scores)

    def error(self, column: BenchmarkColumn) -> float | None:
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
            | {"standard_error": self.error(column)}
            for column, value in self.columns()
        ]
        return {"columns": columns, "average": self.average, "tasks": tasks, **self.facts}


def find_tasks(names: Sequence[str], folder: Path | None = None) -> "TaskManager":
    """A manager that knows these tasks. folder: with task files of the user's, which come before the harness's.

    Raises ValueError, in one line, for a task that does not exist. Loads no data.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    shipped = Path(lm_eval.__file__).parent / "tasks"
    # Of two tasks of one name the later folder's counts.
    folders: list[str | Path] = [*dict.fromkeys(shipped / TASKS[name] for name in names if name in TASKS)]
    folders += [folder] if folder else []
    try:
        manager = TaskManager(include_defaults=False, include_path=folders)
    except Exception as error:  # whatever a user's files lead to
        raise ValueError(f"--task-folder {str(folder)!r}: cannot be read ({one_line(error)})") from None
    for name in names:
        if name not in manager.all_subtasks:
            own = sorted({*manager.all_subtasks} - {*TASKS})
            known = ", ".join([*TASKS, *own])
            raise ValueError(f"--tasks {name}: no such task; known are {known}, and those of a --task-folder")
    return manager


def load_tasks(names: Sequence[str], manager: "TaskManager") -> list[Any]:
    """The tasks with their data, downloaded where the cache lacks them. Raises ValueError, in one line."""
    quiet_datasets()
    offline_unless_the_hub_answers()
    tasks = []
    for name in names:
        try:
            tasks.append(manager.load([name])["tasks"][name])
        except Exception as error:  # of the harness, of datasets, of the network
            why = next((one_line(cause) for cause in causes(error) if isinstance(cause, OSError)), one_line(error))
            raise ValueError(
                f"--tasks {name}: its data cannot be had ({why}); check the network, or leave the task out"
            ) from None
    return tasks


def benchmark(
    model: DecoderLM,
    tokenizer: Tokenizer,
    tasks: Sequence[Any],
    limit: int | None = None,
    autocast: AbstractContextManager[object] | None = None,
    count: Count = lambda _done, _total: None,
) -> Benchmarks:
    """The tasks' metrics of a model, where it is. limit: questions of each task, at most.

    autocast: the precision of the model's passes.
    """
    asked = Asked(model, tokenizer, autocast, count)
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
    return Benchmarks(
        scores,
        {task: counts["effective"] for task, counts in found["n-samples"].items()},
        {task: str(found["versions"][task]) for task in by_name},
        facts,
    )


class Asked(TemplateLM):
    """A model as the harness asks it."""

    def __init__(
        self,
        model: DecoderLM,
        tokenizer: Tokenizer,
        autocast: AbstractContextManager[object] | None = None,
        count: Count = lambda _done, _total: None,
    ) -> None:
        super().__init__()
        self.model, self.text, self.count = model, tokenizer, count
        self.autocast = autocast or torch.autocast(model.device.type, enabled=False)
        self.max_length = model.context_length
        self.requests = self.cut = 0
        """Log-likelihoods that were asked for, and those whose context was cut."""

    @property
    def eot_token_id(self) -> int:
        return self.text.separator

    @property
    def prefix_token_id(self) -> int:
        return self.text.separator if self.text.begin is None else self.text.begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:  # noqa: ARG002
        return self.text.encode([string.encode()])[0].tolist()

    def loglikelihood(self, requests: "list[Instance]", disable_tqdm: bool = True) -> list[tuple[float, bool]]:  # noqa: ARG002
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether it is the greedy one; the longest first."""
        whole = [[*context, *continuation] for _, context, continuation in requests]
        kept = [tokens[-self.max_length - 1 :] for tokens in whole]
        self.requests += len(whole)
        self.cut += sum(len(tokens) > self.max_length + 1 for tokens in whole)
        found: list[tuple[float, bool]] = [(0.0, True)] * len(kept)
        done = 0
        for batch in batches([len(tokens) - 1 for tokens in kept]):
            logits = self._logits([kept[i][:-1] for i in batch])
            for row, i in enumerate(batch):
                end, scored = len(kept[i]) - 1, min(len(requests[i][2]), len(kept[i]) - 1)
                if scored:
                    found[i] = _scored(logits[row, end - scored : end], kept[i][-scored:])
            done += len(batch)
            self.count(done, len(kept))
        return found

    def loglikelihood_rolling(self, requests: "list[Instance]", disable_tqdm: bool = True) -> list[float]:  # noqa: ARG002
        """Of whole texts, token by token once: in windows as long as the context, the last filled up from before it."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scored = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(scored)[0] for _ in text) for text in windows]

    @torch.no_grad()
    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = True) -> list[str]:  # noqa: ARG002
        """The greedy continuation of each context, up to a stop; contexts are cut on their left to leave room."""
        texts = []
        for request in requests:
            context, settings = request.args
            until, most = settings.get("until", []), min(settings.get("max_gen_toks", 256), self.max_length - 1)
            stops = [until] if isinstance(until, str) else list(until)
            whole = self.tok_encode(context) or [self.prefix_token_id]
            kept = whole[-(self.max_length - most) :]
            self.requests, self.cut = self.requests + 1, self.cut + (len(kept) < len(whole))
            texts.append(self._continued(kept, stops, most))
            self.count(len(texts), len(requests))
        return texts

    def _continued(self, context: list[int], stops: Iterable[str], most: int) -> str:
        cache, given, drawn, text = self.model.new_cache(), context, [], ""
        while len(drawn) < most and not any(stop in text for stop in stops):
            tokens = torch.tensor([given], device=self.model.device)
            with self.autocast:
                token = int(self.model(tokens, cache)[0, -1].argmax())
            if token == self.eot_token_id:
                break
            drawn.append(token)
            given, text = [token], "".join(self.text.decode(drawn, context))
        ends = [text.find(stop) for stop in stops if stop and stop in text]
        return text[: min(ends)] if ends else text

    @torch.no_grad()
    def _logits(self, rows: list[list[int]]) -> Tensor:
        """`[n, longest, vocab]`; the rows are padded on their right, at which no token looks."""
        longest = max(map(len, rows))
        tokens = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.model.device)
        with self.autocast:
            return self.model(tokens)


def _scored(logits: Tensor, targets: list[int]) -> tuple[float, bool]:
    """The sum of the targets' log-probabilities, logits `[n, vocab]`, and whether each target is the most probable."""
    wanted = torch.tensor(targets, device=logits.device)
    chosen = logits.float().log_softmax(-1).gather(-1, wanted[:, None])
    return chosen.double().sum().item(), bool((logits.argmax(-1) == wanted).all())


def batches(lengths: Sequence[int], most: int = TOKENS_AT_ONCE) -> "list[list[int]]":
    """Numbers of sequences, the longest first, so many at a time that they hold `most` tokens, padding included."""
    found: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not found or (len(found[-1]) + 1) * lengths[found[-1][0]] > most:
            found.append([])
        found[-1].append(i)
    return found
