"""The Python API imports instantly, exports only what it documents, runs its examples, reports errors in one line."""

import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from made_grid import MadeGrid
from mistakes import snapshot_tree
from stores import make_runs
from untrained import save

import lit_lazy
from lit_lazy import api, load, results, show, train
from lit_lazy.attention import Elastic, Eviction, RetNet
from lit_lazy.command.doctor_new_fields import fill_template
from lit_lazy.command.main import main
from lit_lazy.config import experiment, replace_at
from lit_lazy.config.user_files import load_experiment
from lit_lazy.training.head_monitor import HeadMonitor

TINY = "backcopy_tiny"


@pytest.mark.long
def test_load_does_not_import_mlflow_nor_the_kernels_the_compiler() -> None:
    for code, absent in (("from lit_lazy import load", "mlflow"), ("import flash_lazy", "torch._dynamo")):
        subprocess.run([sys.executable, "-c", f"import sys; {code}; assert {absent!r} not in sys.modules"], check=True)


def test_it_is_what_all_says() -> None:
    assert lit_lazy.__all__ == ["load", "results", "show", "train"]
    assert set(lit_lazy.__all__) <= set(dir(lit_lazy))
    public = {name for name, made in vars(api).items() if inspect.isfunction(made) and made.__module__ == api.__name__}
    assert {name for name in public if not name.startswith("_")} == set(lit_lazy.__all__)
    with pytest.raises(AttributeError, match="module 'lit_lazy' has no attribute 'sweep'"):
        _ = lit_lazy.sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Iterator[Path]:
    """The current folder, with a prepared store in runs/."""
    folder = make_runs(tmp_path_factory.mktemp("api"), empty_store).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.set_num_threads(1)
        yield folder


NAMED = {
    test.name.rpartition(".")[2]: test
    for test in doctest.DocTestFinder(exclude_empty=False).find(api)
    if test.docstring and test.examples
}


def test_everything_public_has_an_example() -> None:
    assert NAMED.keys() >= {*lit_lazy.__all__, "generate", "weights", "diagnose", "with_", "raise_thresholds"}


@pytest.mark.parametrize("name", [name for name in NAMED if name != "results"])
@pytest.mark.usefixtures("folder")
def test_the_example_runs(name: str) -> None:
    """The example of `results` needs a grid: tests/report/test_report.py."""
    said: list[str] = []
    assert doctest.DocTestRunner().run(NAMED[name], out=said.append).failed == 0, "".join(said)


def test_a_config_is_trained_once(folder: Path) -> None:
    cfg = replace_at(experiment("backcopy_tiny"), {"seed": 5})
    first, again = train(cfg), train(cfg)
    assert (first.first_step, again.first_step, first.steps) == (0, 6, 6)
    assert first.result == again.result
    loss = f"{first.metrics['loss/val']:.4f}"
    assert repr(first) == f"<train-notebook: 6 steps, from the beginning; loss/val {loss}; {first.checkpoint}>"
    (folder / first.checkpoint).unlink()
    with pytest.raises(ValueError, match="was not kept; remove that folder to train it again"):
        _ = again.checkpoint


@pytest.fixture(scope="module")
def model(folder: Path) -> api.Model:
    changes = {"model.attention.normaliser": Elastic(), "model.n_heads": 2, "model.n_layers": 2}
    return load(save(folder / "lazy.ckpt", replace_at(experiment("backcopy_tiny"), changes)))


RETNET = replace_at(experiment(TINY), {"model.mixer": RetNet()})
WEIGHTS = np.tril(np.full((2, 3, 10, 10), 0.1, np.float32))
MISTAKES: list[tuple[Callable[[api.Model], object], str]] = [
    (lambda _: train(TINY, runs=""), "runs='': must be a path"),
    (lambda _: train(TINY, threads=100_000), "threads=100000: must be a whole number of at least 1 and at"),
    (lambda _: train(TINY, loggers=[["csv"]]), "loggers ['csv']: unknown; there are csv"),
    (lambda _: load("final.ckpt", imports="mine.py"), "imports='mine.py': must be a list or tuple, also of one"),
    (lambda model: model.weights([[0, 1]]), "tokens=[[0, 1]]: must be one list of whole numbers, each from 0 to 16"),
    (lambda model: model.generate("0", temperature="1"), "temperature='1': must be a finite number of at least 0"),
    (lambda model: model.generate("0", eviction=64), "eviction=64: must be an Eviction or None"),
    (lambda _: load(save(Path("retnet.ckpt"), RETNET)).weights([1]), "weights='RetNet': has no attention"),
    (lambda _: show(np.zeros((2, 3))), "weights=[2, 3]: must have the shape [L, L]"),
    (lambda _: show(WEIGHTS, ["a"] * 9), "labels='9 texts': must be a text for each of the 10 positions"),
    (lambda _: show(np.full((3, 3), np.nan)), "must be finite"),
    (lambda _: show("high"), "weights='high' ("),
    (lambda model: model.with_(None), "changes=None: must be a dict"),
    (lambda _: train("backcopy_tiny", [("train.steps", 3)]), "changes=[('train.steps', 3)]: must be a dict"),
    (lambda _: load(save(Path("retnet.ckpt"), RETNET)).raise_thresholds(0.1), "model.mixer='RetNet': has no attention"),
    (lambda model: model.raise_thresholds(0.1, sequences=0), "sequences=0: must be a whole number of at least 1"),
]


@pytest.mark.parametrize(("call", "said"), MISTAKES, ids=[said for _, said in MISTAKES])
def test_mistakes_are_named_and_create_nothing(call, said: str, model: api.Model, folder: Path) -> None:
    before = snapshot_tree(folder / "runs")
    with pytest.raises(ValueError, match=re.escape(said)):
        call(model)
    assert snapshot_tree(folder / "runs") == before


@torch.no_grad()
def test_weights_are_those_that_make_the_output(model: api.Model, folder: Path) -> None:
    """In every layer and head, weights times values equal attention's output, and future keys have weight 0."""
    tokens = list(range(1, 13))
    weights = model.weights(tokens)
    assert weights.shape == (2, 2, 12, 12)
    attention, seen = model.decoder.attentions[0], []
    attention.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = model.decoder.blocks[0].attention_norm(model.decoder.embedding(torch.tensor([tokens])))
    model.decoder(torch.tensor([tokens]))
    v = attention.v(x).unflatten(-1, (2, -1)).transpose(1, 2)[0]
    torch.testing.assert_close((weights[0] @ v).transpose(0, 1).flatten(1), seen[0][0], rtol=1e-4, atol=1e-6)
    for given in (tuple(tokens), np.array(tokens), torch.tensor(tokens), " ".join(map(str, tokens))):
        assert torch.equal(weights, model.weights(given))
    numbers = sum(parameter.numel() for parameter in model.decoder.parameters())
    assert repr(model) == f"<Model: Elastic, NoBias; 2 layers, {numbers:,} parameters; {folder / 'lazy.ckpt'}>"
    assert model.diagnose(sequences=np.int64(5)).arrays["sample"].tolist() == [5, 16, 2]


def test_a_cache_that_evicts_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"model.init_std": 0.3, "model.attention.normaliser": Elastic()}
    checkpoint = save(tmp_path / "lively.ckpt", replace_at(experiment("backcopy_tiny"), changes))
    prompt, drawn = "0 5 3 7 2 9 5 3", {"tokens": 20, "temperature": 0.5}
    words = ["--prompt", prompt, "--tokens", "20", "--temperature", "0.5", "--window", "2", "--first", "1"]
    assert main(["generate", checkpoint, *words]) == 0
    model = load(checkpoint)
    found = model.generate(prompt, **drawn, eviction=Eviction(first=1, window=2))
    assert capsys.readouterr().out.split() == found.split() != model.generate(prompt, **drawn).split()


def test_a_map_is_shown_for_each_head_with_the_texts_of_its_positions() -> None:
    heads = [f"head {head}" for head in (0, 1, 2)]
    for weights, titles in (
        (WEIGHTS, [f"layer {layer}, {head}" for layer in (0, 1) for head in heads]),
        (torch.from_numpy(WEIGHTS[1]), ["map 1", "map 2", "map 3"]),
    ):
        assert [axes.get_title() for axes in show(weights).axes if axes.get_title()] == titles
    learned = torch.from_numpy(WEIGHTS[0, 0]).double().requires_grad_()
    full, first = show(learned, np.array(["the", " $x$", "\n", *"abcdefg"])).axes[:2]
    written = [r"the", r" \$x\$", r"\n", *"abcdefg"]
    for axis, count in ((full.xaxis, 10), (full.yaxis, 10), (first.xaxis, 8), (first.yaxis, 10)):
        assert [label.get_text() for label in axis.get_ticklabels()] == written[:count]


def test_results_on_several_experiments_are_listed(tmp_path: Path) -> None:
    for name in ("other-backcopy", "table2-backcopy", "table2-backcopy_tiny"):
        MadeGrid(tmp_path, name=name).change_plan(ablation=name.partition("-")[0])
    with pytest.raises(ValueError, match=r"^results='table2': .* has several; give one of table2-.*, table2-\w+$"):
        results("table2", tmp_path)


def test_a_metric_replaces_no_column_of_the_cells(tmp_path: Path) -> None:
    made = MadeGrid(tmp_path)
    made.finish(made.plan.rows[0].variant, 1, {"seed": 7.0})
    cells = results("made", tmp_path).cells
    assert {*cells["seed"]} == {0, 1}
    assert cells["metric seed"].dropna().tolist() == [7.0]


def test_an_ablation_whose_name_begins_alike_is_another(tmp_path: Path) -> None:
    MadeGrid(tmp_path, name="mine-long-backcopy").change_plan(ablation="mine-long")
    with pytest.raises(ValueError, match=r"^results='mine': .* holds no such ablation"):
        results("mine", tmp_path)
    for name, status in (("mine", 2), ("mine-long", 0)):
        assert main(["runs", "rm", name, "--runs", str(tmp_path)]) == status


def test_a_file_may_be_edited_while_it_is_trained(tmp_path, runs, monkeypatch, caplog) -> None:
    """Its checkpoints and its result hold the digest of the code that runs; afterwards it is not trained."""
    file = tmp_path / "rule.py"
    (tmp_path / "later.py").write_text("")
    file.write_text(fill_template("normaliser", "edited").replace("backcopy_small", "backcopy_tiny"))

    def edit(*_: object) -> None:
        file.write_text(file.read_text() + "import later\n")

    monkeypatch.setattr(HeadMonitor, "on_train_batch_end", edit)
    former = load_experiment(file)
    done = train(str(file), runs=runs)
    assert file.read_text().count("later") == 6
    assert done.result.training_key == done.result.key
    load(done.checkpoint)
    assert "has changed" not in caplog.text
    for config in (str(file), former):
        with pytest.raises(ValueError, match=r"^/.*/rule\.py: was edited after it was imported; start a new process"):
            train(config, runs=tmp_path / "others")
    assert not (tmp_path / "others").exists()
