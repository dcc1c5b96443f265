"""lm-evaluation-harness on our models: real prompts on small local files, log-likelihoods against plain sums."""

import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import untrained
import yaml
from mistakes import expect_refusal
from subwords import bpe
from task_files import QUESTIONS

from lit_lazy.attention import AttentionSpec, Elastic, LearnedAbsolute, LearnedBias, Rope
from lit_lazy.command.main import main
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.config.key import evaluation_key
from lit_lazy.config.user_files import experiment
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.data.text import Text
from lit_lazy.grid.benchmarks import BENCHMARK_COLUMNS
from lit_lazy.measure.lm_eval import COLUMNS, TASKS, LmEval, benchmark, find_tasks, load_tasks
from lit_lazy.measure.lm_eval.adapter import LmEvalAdapter
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Prompts
from lit_lazy.tracking.store_address import default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training import checkpoints
from lit_lazy.training.run import run

__all__ = ["bpe"]
CONTEXT = 96
PROMPTS = Prompts(Stdlib(), 256)
pytestmark = pytest.mark.usefixtures("offline")


def config(data=None, **model):
    sizes = {"d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 48, "position": Rope(), "init_std": 0.3, **model}
    return RunConfig(data or Stdlib(context_length=CONTEXT), ModelConfig(**sizes), TrainConfig())


@pytest.fixture(scope="module")
def model():
    """Elastic-Softmax on bytes, with initial weights so large that its predictions are not uniform."""
    spec = AttentionSpec(Elastic(tau_init=0.3), LearnedBias(init_std=0.5))
    return DecoderLM(config(attention=spec).model, 256, CONTEXT, seed=0)


def save(cfg, path, vocab_size=256):
    """A checkpoint of an untrained model."""
    return Path(untrained.save(path, cfg, vocab_size, CONTEXT))


def request(*args):
    return SimpleNamespace(args=args)


@torch.no_grad()
def plain(model, context, continuation):
    """Reference log-likelihood, token by token after at most CONTEXT tokens; an empty context is the separator."""
    whole = list(context or b"\0") + list(continuation)
    kept = whole[-CONTEXT - 1 :]
    logits = model(torch.tensor([kept[:-1]]))[0].double().log_softmax(-1)
    total, greedy = 0.0, True
    for place in range(len(kept) - min(len(continuation), len(kept) - 1), len(kept)):
        total += logits[place - 1, kept[place]].item()
        greedy = greedy and int(logits[place - 1].argmax()) == kept[place]
    return total, greedy


def test_log_likelihoods_are_those_of_a_plain_sum(model):
    rng = random.Random(0)

    def letters(least, most):
        return bytes(rng.choices(range(97, 123), k=rng.randint(least, most)))

    pairs = [(letters(0, 150), letters(1, 20)) for _ in range(60)]
    pairs += [(b"", b"x"), (b"a" * 300, b"b"), (b"a", b"b" * 96), (b"a", b"b" * 130)]
    counted = []
    asked = LmEvalAdapter(model.eval(), PROMPTS, count=lambda *count: counted.append(count))
    found = asked.loglikelihood([request(c.decode(), t.decode()) for c, t in pairs])
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        wanted, is_greedy = plain(model, context, continuation)
        assert value == pytest.approx(wanted, abs=1e-3)
        assert greedy is is_greedy
    assert asked.requests == len(pairs)
    assert asked.cut == sum(len(c or b"\0") + len(t) > CONTEXT + 1 for c, t in pairs) > 2
    assert counted[-1] == (len(pairs), len(pairs))


@torch.no_grad()
def greedy_text(model, context, n):
    tokens = list(context)
    for _ in range(n):
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return bytes(tokens[len(context) :])


def test_greedy_texts(model):
    text = greedy_text(model.eval(), b"weights", 12).decode(errors="replace")
    asked = LmEvalAdapter(model, PROMPTS)

    def generate(context, until, n=12):
        (found,) = asked.generate_until([request(context, {"until": until, "max_gen_toks": n})])
        return found

    assert generate("weights", []) == text
    assert generate("weights", text[:1]) == ""
    assert generate("weights", [text[5:7]]) == text[: text.index(text[5:7])]
    first = greedy_text(model, b"weights", 1)[0]
    ends = Prompts(Text(special_tokens=SpecialTokens(ends=(255, first))), 256)  # of an imported model
    assert LmEvalAdapter(model, ends).generate_until([request("weights", {"max_gen_toks": 12})]) == [""]
    before = asked.cut
    assert generate("a" * 500, [], 4) == greedy_text(model, b"a" * (CONTEXT - 4), 4).decode(errors="replace")
    assert asked.cut == before + 1


def rolling(model, text):
    """Reference for a full text: windows of CONTEXT tokens after the token before each; the last one overlaps."""
    total = 0.0
    for at in range(0, len(text), CONTEXT):
        end = min(at + CONTEXT, len(text))
        before = text[max(0, end - CONTEXT - 1) : at] if at else b""
        total += plain(model, before, text[at:end])[0]
    return total


@pytest.mark.parametrize("length", [0, 1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT + 5])
def test_rolling_windows_count_each_token_once(model, length):
    text = bytes(random.Random(length).choices(range(97, 123), k=length))
    (found,) = LmEvalAdapter(model.eval(), PROMPTS).loglikelihood_rolling([request(text.decode())])
    assert found == pytest.approx(rolling(model, text), abs=1e-3)


def test_the_nine_tasks_with_their_real_prompts(model, task_folder):
    tasks = load_tasks(list(TASKS), find_tasks(list(TASKS), task_folder))
    found = benchmark(model, PROMPTS, tasks)
    assert len(found.columns()) == len(COLUMNS)
    assert found.samples == {task: len(questions) for task, questions in QUESTIONS.items()}
    assert found.facts["requests_cut_on_the_left"] > 0  # the passages
    scores = found.scores

    def total(context, continuation):
        return plain(model, context.encode(), continuation.encode())[0]

    # By word, not by token: exp(-sum / words), with words counted in the raw page.
    (page,) = (question["page"] for question in QUESTIONS["wikitext"])
    rolled = rolling(model, tasks[0].doc_to_target({"page": page}).encode())
    words = len(re.split(r"\s+", page))
    assert scores["wikitext", "word_perplexity"] == pytest.approx(math.exp(-rolled / words), rel=1e-3)
    assert math.log(scores["wikitext", "byte_perplexity"]) == pytest.approx(-rolled / len(page.encode()), rel=1e-4)
    lambada = [total(text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in
               (question["text"] for question in QUESTIONS["lambada_openai"])]  # fmt: skip
    assert scores["lambada_openai", "perplexity"] == pytest.approx(math.exp(-sum(lambada) / 2), rel=1e-3)
    # hellaswag's acc_norm divides by the length of an ending, piqa's acc does not.
    endings = ["stops . there", "sees (it)", "is a sink", "ends"]
    by_length = [total("Attending: A head attends. Then it", f" {x}") / len(x) for x in endings]
    assert scores["hellaswag", "acc_norm"] == (by_length.index(max(by_length)) == 1)
    prompt = "Question: Cut a weight.\nAnswer:"
    by_sum = [total(prompt, f" {QUESTIONS['piqa'][0][name]}") for name in ("sol1", "sol2")]
    assert scores["piqa", "acc"] == (by_sum[0] > by_sum[1])
    wino = [total(f"The {x}", " was cut.") for x in ("weight", "head")]
    assert scores["winogrande", "acc"] == (wino[0] > wino[1])
    assert found.average == pytest.approx(
        sum(scores[column.task, column.metric] for column in COLUMNS if column.is_accuracy) / 8
    )
    assert found.metrics()["lm-eval/average"] == found.average
    assert found.standard_error(COLUMNS[-1]) == pytest.approx(
        math.sqrt(scores["boolq", "acc"] * (1 - scores["boolq", "acc"]) / 2)
    )
    assert benchmark(model, PROMPTS, tasks, limit=1).samples["boolq"] == 1


# The command


@pytest.fixture
def checkpoint(runs):
    """Checkpoint of a run recorded in MLflow."""
    run_folder = runs / "train-x" / "abc"
    run_folder.mkdir(parents=True)
    tracker = Tracker(default_uri(runs), "train-x")
    run_id = tracker.create_run("x", {"kind": "run", "cell": "abc"})
    (run_folder / "mlflow_run_id").write_text(f"{run_id} {tracker.experiment_id}")
    return save(config(), run_folder / "final.ckpt")


def test_a_users_task_has_its_own_shots_and_filters(model, tmp_path):
    (tmp_path / "own.jsonl").write_text('{"q": "ab", "a": "c"}\n' * 3)
    files = {split: str(tmp_path / "own.jsonl") for split in ("train", "test")}
    filters = {"any": "(.)", "none of it": "(QQQ)"}
    content = {
        "task": "own",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "training_split": "train",
        "test_split": "test",
        "num_fewshot": 2,
        "output_type": "generate_until",
        "generation_kwargs": {"until": [], "max_gen_toks": 3},
        "doc_to_text": "{{q}}",
        "doc_to_target": "[invalid]",
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": name, "filter": [{"function": "regex", "regex_pattern": kept}, {"function": "take_first"}]}
            for name, kept in filters.items()
        ],
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(content))
    tasks = load_tasks(["own"], find_tasks(["own"], tmp_path))
    found = benchmark(model, PROMPTS, tasks)
    assert found.scores == {("own", "exact_match/any"): 0, ("own", "exact_match/none of it"): 1}
    assert len(tasks[0].instances[0].args[0]) > len("ab[invalid]")  # two examples before the question


def test_the_command_prints_writes_and_logs(checkpoint, task_folder, runs, tmp_path, capsys):
    out = tmp_path / "new" / "scores.json"
    asked = ["--task-folder", str(task_folder)]
    assert main(["lm-eval", str(checkpoint), *asked, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    known = json.loads(out.read_text())
    for column in COLUMNS:
        value = known["tasks"][column.task]["metrics"][column.metric]
        assert f"{column.title:9} {column.task:15} {column.metric:16} {value:10.4f}" in printed
    assert f"{known['average']:.4f}            of the eight accuracies" in printed
    assert "prefix token '\\x00' (0)" in printed
    assert [column["title"] for column in known["columns"]] == [column.title for column in COLUMNS]
    assert known["columns"][0]["standard_error"] is None
    assert known["columns"][-1]["standard_error"] is not None
    run_id, _ = (checkpoint.parent / "mlflow_run_id").read_text().split()
    assert f"logged to MLflow with run {run_id}" in printed
    metrics = Tracker(default_uri(runs), "train-x").client.get_run(run_id).data.metrics
    assert metrics["lm-eval/average"] == known["average"]
    perplexity = known["tasks"]["wikitext"]["metrics"]["word_perplexity"]
    assert metrics["lm-eval/wikitext/word_perplexity"] == pytest.approx(perplexity)
    (stored,) = (runs / "mlartifacts").glob(f"*/{run_id}/artifacts/lm-eval.json")
    assert json.loads(stored.read_text())["average"] == known["average"]
    # With a limit, or of a checkpoint elsewhere, also one whose positions end where the context does.
    assert main(["lm-eval", str(checkpoint), *asked, "--tasks", "boolq", "--limit", "2"]) == 0
    assert "not logged to MLflow: with --limit" in capsys.readouterr().out
    moved = save(config(position=LearnedAbsolute()), tmp_path / "moved.ckpt")
    assert main(["lm-eval", str(moved), *asked, "--tasks", "boolq,wikitext"]) == 0
    assert f"not logged to MLflow: {tmp_path} belongs to no run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cfg", "more", "line"),
    [
        (None, ["--tasks", "piqa"], "--tasks='piqa': its data cannot be loaded ("),
        (None, ["--out", "x.txt"], "must end in .json"),
        (None, ["--out", "folder.json"], "--out 'folder.json': is a folder; name a file in it"),
        (config(Text("x", tokenizer="gone.json")), ["--tasks", "piqa"], "gone.json': cannot be read (No such file"),
        (config(Text("x")), ["--tasks", "piqa"], "vocabulary size of the tokenizer=256: the model has 300 token ids"),
    ],
)
@pytest.mark.usefixtures("place")
def test_a_mistake_is_one_line_and_creates_nothing(checkpoint, runs, cfg, more, line, capsys):
    if cfg is not None:
        save(cfg, checkpoint, vocab_size=300)
    Path("folder.json").mkdir()
    before = sorted(runs.rglob("*"))
    assert line in expect_refusal(["lm-eval", str(checkpoint), *more], capsys)
    assert sorted(runs.rglob("*")) == before


# An evaluation of a run


def answers(harness, tasks):
    """Accuracies by task and log-likelihoods of all of the harness's requests."""
    import lm_eval

    loaded = {"tasks": {task.config.task: task for task in tasks}, "groups": {}, "group_map": {}}
    found = lm_eval.evaluate(harness, task_dict=loaded, bootstrap_iters=0, log_samples=True)
    accuracies = {task: scores["acc,none"] for task, scores in found["results"].items() if "acc,none" in scores}
    samples = [sample for task in found["samples"].values() for sample in task]
    pairs = [response for sample in samples for (response,) in sample["resps"]]
    return accuracies, [pair[0] if isinstance(pair, tuple | list) else pair for pair in pairs]


@pytest.mark.long
@pytest.mark.usefixtures("module_cache")
def test_of_an_exported_model_the_harness_itself_says_the_same(bpe, task_folder, tmp_path):
    """With the harness's class for transformers (`--model hf`) on the exported folder."""
    from lm_eval.models.huggingface import HFLM

    data = Text("gone.txt", tokenizer=str(bpe), begin_of_text="<s>", context_length=CONTEXT)
    prompts = Prompts(data, data.load_tokenizer().vocab_size)
    spec = AttentionSpec(Elastic(tau_init=0.3), LearnedBias(init_std=0.5))
    checkpoint = save(config(data, attention=spec), tmp_path / "final.ckpt", prompts.vocab_size)
    names, exported, out = ["boolq", "lambada_openai", "wikitext"], tmp_path / "exported", tmp_path / "scores.json"
    asked = ["lm-eval", str(checkpoint), "--tasks", ",".join(names), "--task-folder", str(task_folder)]
    assert main([*asked, "--out", str(out)]) == 0
    assert main(["export", str(checkpoint), str(exported)]) == 0
    ours = {task: found["metrics"] for task, found in json.loads(out.read_text())["tasks"].items()}

    theirs = HFLM(str(exported), device="cpu", dtype="float32", batch_size=4, trust_remote_code=True)
    tasks = load_tasks(names, find_tasks(names, task_folder))
    for task in tasks:
        task.set_config(key="num_fewshot", value=0)
    accuracies, sums = answers(theirs, tasks)
    assert accuracies == {task: ours[task]["acc"] for task in ("boolq", "lambada_openai")}
    model = checkpoints.load(checkpoint).model.eval()
    again, wanted = answers(LmEvalAdapter(model, prompts), tasks)
    assert again == accuracies
    assert len(wanted) == len(sums) == 2 * 3 + 2 + 1
    assert sums == pytest.approx(wanted, rel=1e-4)


def test_a_run_that_asks_for_them_has_their_scores(task_folder, tmp_path):
    asked = LmEval(("boolq", "wikitext"), task_folder=str(task_folder))
    found = run(replace(experiment("stdlib_tiny"), evaluations=(asked,)), tmp_path, keep_checkpoint=True).metrics
    tasks = load_tasks(asked.tasks, find_tasks(asked.tasks, task_folder))
    wanted = benchmark(checkpoints.load(tmp_path / "final.ckpt").model, PROMPTS, tasks).metrics()
    assert {name: value for name, value in found.items() if name.startswith("lm-eval/")} == wanted
    keys = [column.key for column in BENCHMARK_COLUMNS if column.key in found]
    assert keys == ["lm-eval/wikitext/word_perplexity", "lm-eval/boolq/acc"]


def test_what_an_import_of_its_functions_writes_is_not_in_its_key(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: mine")
    asked = LmEval(("mine",), task_folder=str(tmp_path))
    first = evaluation_key(asked)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "utils.pyc").write_text("written as its functions are imported")
    assert evaluation_key(asked) == first


def test_without_the_package_it_says_what_brings_it(checkpoint, model, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["lm-eval", str(checkpoint)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'lit-lazy[lm-eval]'" in line
    with pytest.raises(ValueError, match=r"pip install 'lit-lazy\[lm-eval\]'"):
        LmEval(("piqa", "boolq")).check(model, Stdlib(context_length=CONTEXT))
