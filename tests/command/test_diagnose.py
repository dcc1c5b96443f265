"""`lit-lazy diagnose`: arrays, figures and MLflow run of a checkpoint; Table 1; a mistake is one line."""

import json
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from mistakes import expect_refusal
from stores import make_runs
from untrained import save

from lit_lazy.attention import Elastic, Eviction, LearnedAbsolute, LearnedBias, Mamba2
from lit_lazy.command.main import main
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import Maps, measure
from lit_lazy.report.diagnose_checkpoint import Request, diagnose
from lit_lazy.table.build import read_table
from lit_lazy.tracking.store_address import TrackingError, default_uri
from lit_lazy.tracking.tracker import Tracker
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import FINAL_CHECKPOINT, RESULT

pytestmark = pytest.mark.xdist_group("diagnose")  # one process trains and diagnoses
MAMBA = experiment("backcopy_tiny", {"model.mixer": Mamba2()})
LAZY = {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()}
CFG = experiment("backcopy_tiny", {"model.n_layers": 2, "model.n_heads": 2, **LAZY})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in a finished run folder."""
    folder = tmp_path_factory.mktemp("trained") / "abcdef"
    torch.set_num_threads(1)
    run(CFG, folder, keep_checkpoint=True)
    return folder / FINAL_CHECKPOINT


@pytest.fixture(scope="module")
def diagnosed(trained: Path, tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """The folder of a diagnosis of the checkpoint at further lengths."""
    runs = make_runs(tmp_path_factory.mktemp("diagnosed"), empty_store)
    options = ["--lengths", "24,16,32", "--layers", "1,0", "--heads", "1", "--sequences", "10", "--threads", "1"]
    assert main(["diagnose", str(trained), "--runs", str(runs), *options]) == 0
    return find_folder(runs)


def find_folder(runs: Path) -> Path:
    """The folder of the only diagnosis."""
    (folder,) = runs.glob("diagnose-abcdef-final-*")
    return folder


def test_only_a_request_for_the_same_results_has_the_same_folder() -> None:
    first = Request(Path("a/model.ckpt"))
    assert re.fullmatch(r"runs/diagnose-a-model-\w{6}", str(first.folder))
    assert Request(Path.cwd() / "b/../a/model.ckpt", runs=Path("elsewhere")).folder.name == first.folder.name
    others = {
        "checkpoint": [Path("b/model.ckpt"), Path("b/a/model.ckpt")],
        "overrides": [("--data.task_seed=1",)],
        "rise": [0.1],
        "data": ["stdlib", "a/stdlib.py"],
        "lengths": [(32,)],
        "eviction": [Eviction(4, 8), Eviction(4, 9)],
        "maps": [Maps(layers=(0,)), Maps(heads=(0,))],
        "sequences": [8],
    }
    assert {field.name for field in fields(Request)} == {*others, "out", "runs"}
    requests = [first, *(replace(first, **{name: value}) for name, values in others.items() for value in values)]
    assert len({request.folder for request in requests}) == len(requests)


def test_the_arrays_are_those_of_the_model_its_beginning_and_the_lengths(diagnosed, trained) -> None:
    found = Diagnostics.load(diagnosed / "diagnostics.npz")
    assert found.prefixes == ["", "init/", "L24/", "L16/", "L32/"]
    module = LitLM(**read_checkpoint(trained)["hyper_parameters"])
    source = CFG.data.load()
    every = [source.validation.__getitems__([3 * i + i // 5 for i in range(10)])]  # 10 of 32, evenly spread
    for prefixes in (("init/",), ("", "L16/")):
        for name, array in measure(module.model, every, None, 10).arrays.items():
            for prefix in prefixes:
                np.testing.assert_array_equal(found.arrays[prefix + name], array, err_msg=name)
        module.load_state_dict(read_checkpoint(trained)["state_dict"])
    assert not np.array_equal(found.arrays["tau"], found.arrays["init/tau"])
    assert found.arrays["L32/loss/by_position"].shape == (32,)
    assert found.arrays["L32/sample"].tolist() == [10, 32, 2]
    # A longer sequence of this data begins with the shorter one.
    np.testing.assert_allclose(found.arrays["L32/loss/by_position"][:16], found.arrays["loss/by_position"], rtol=1e-5)
    assert found.arrays["maps/heads"].tolist() == [[1, 1], [0, 1]]
    assert not any("maps/" in name for name in found.arrays if name.startswith(("init/", "L")))
    kept = Diagnostics.load(trained.parent / "diagnostics.npz").arrays
    assert found.arrays["watch/step"].tolist() == [0, 1, 2, 3, 4, 6]
    np.testing.assert_array_equal(found.arrays["watch/tau"], kept["watch/tau"])


def test_facts_figures_and_the_run_in_mlflow_say_what_was_measured(diagnosed, trained) -> None:
    facts = json.loads((diagnosed / "diagnostics.json").read_text())
    assert (facts["checkpoint"], facts["sequences"], facts["maps"]) == (str(trained), 10, [[1, 1], [0, 1]])
    assert facts["data"]["L24/"]["context_length"] == 24
    assert facts["data"]["trained"]["fingerprint"] == CFG.data.load().fingerprint
    assert {"git_sha", "torch", "python", "machine"} <= facts["versions"].keys()
    assert Diagnostics.load(diagnosed / "diagnostics.npz").scalars().items() <= facts["metrics"].items()
    for name in ("attention_maps", "mass_by_position", "sparsity_by_layer", "bias_curves", "loss_by_length"):
        assert {f"{name}.png", f"{name}.svg"} <= {path.name for path in diagnosed.iterdir()}
    tracker = Tracker(default_uri(diagnosed.parent), "diagnose")
    [found] = tracker.find({"kind": "diagnose"})
    shown, tags = found.data, ("state", "normaliser", "bias", "position")
    assert [shown.tags[name] for name in tags] == ["complete", "Elastic", "LearnedBias", "Rope"]
    assert shown.metrics == pytest.approx(facts["metrics"])
    kept = {artifact.path for artifact in tracker.client.list_artifacts(found.info.run_id)}
    assert kept == {path.name for path in diagnosed.iterdir()} | {"config.yaml"}
    assert (
        shown.params.items()
        >= {"diagnosed.lengths": "16,24,16,32", "model.attention.normaliser.tau_init": "1.0"}.items()
    )


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without figures, which take most of the time."""
    monkeypatch.setattr("lit_lazy.report.diagnose_checkpoint.draw_run_figures", lambda *_: {})


@pytest.mark.usefixtures("undrawn")
def test_lengths_with_a_cache_that_evicts(trained: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lengths", "40", "--first", "2", "--window", "10", "--sequences", "6", "--threads", "1"]
    assert main(["diagnose", str(trained), "--runs", str(runs), *options]) == 0
    said = capsys.readouterr().out
    assert said.count("the same with the first 2 and 10 newest tokens in its cache, token by token (") == 2
    scalars = said.partition("\n\n")[2].splitlines()
    assert scalars[0].split() == ["trained", "init", "L40"]
    metrics = json.loads((find_folder(runs) / "diagnostics.json").read_text())["metrics"]
    keys = [f"{metrics[f'{prefix}entropy/keys']:.4g}" for prefix in ("", "init/", "L40/")]
    assert scalars[scalars.index("entropy") + 1].split() == ["keys", *keys]
    arrays = Diagnostics.load(find_folder(runs) / "diagnostics.npz").arrays
    assert arrays["L40/streamed/kept"].tolist() == [2, 10]
    assert arrays["L40/streamed/n"].tolist() == [*range(1, 12), *[12] * 29]
    whole, streamed = arrays["L40/loss/by_position"], arrays["L40/streamed/loss"]
    np.testing.assert_allclose(streamed[:12], whole[:12], rtol=1e-5)
    assert (streamed[12:] != whole[12:]).all()
    group = [line.split() for line in said[said.index("\nstreamed") :].splitlines()[2:]]
    shown = {name: value for name, *_, value in group[: next(i for i, words in enumerate(group) if len(words) == 1)]}
    assert shown["n"] == "12"
    assert shown["perplexity"] == f"{np.exp(streamed.mean(dtype=np.float64)):.4g}"
    assert shown["perplexity_beyond"] == f"{np.exp(streamed[16:].mean(dtype=np.float64)):.4g}"
    assert shown["perplexity_evicted"] == f"{np.exp(streamed[12:].mean(dtype=np.float64)):.4g}"
    assert shown["theta"] == f"{arrays['tau'].mean() / 12:.4g}"


@pytest.mark.usefixtures("undrawn")
def test_mlflow_out_of_reach_leaves_the_results(trained, runs, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Tracker, "update", Mock(side_effect=TrackingError("gone away")))
    assert main(["diagnose", str(trained), "--runs", str(runs), "--threads", "1"]) == 1
    folder, error = find_folder(runs), capsys.readouterr().err
    assert error.startswith(f"lit-lazy: results are in {folder}, but MLflow did not store them (gone away); run the")
    assert (folder / "diagnostics.npz").exists()


BEYOND = "lit-lazy: --lengths 100000: data.validation_windows=16: the validation text under "
WRONG = [
    ("model.ckpt --layers 0,7", "--layers 7: the model has 2 layers; choose from 0 to 1"),
    ("model.ckpt --data stdlib_tiny", "--data 'stdlib_tiny': the model has a vocabulary of 17 tokens, these data have"),
    ("model.ckpt --train.steps=3", "train.steps: has no effect on a trained model; set only fields of model and data"),
    ("short.ckpt", "was trained on data with context_length=12, which now has context_length=16"),
    ("learned.ckpt --lengths 17", "--lengths 17: LearnedAbsolute: 17 positions requested, 16 learned; "),
    ("text.ckpt --lengths 64,100000", BEYOND),
]


def test_mistakes(trained, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained, "model.ckpt")
    save(Path("short.ckpt"), CFG, context_length=12)
    save(Path("learned.ckpt"), replace_at(CFG, {"model.position": LearnedAbsolute()}))
    save(Path("text.ckpt"), experiment("stdlib_tiny"), 256, 32)
    for words, named in WRONG:
        assert named in expect_refusal(["diagnose", *words.split()], capsys)


@pytest.mark.usefixtures("undrawn")
def test_a_long_measurement_says_where_it_is_and_can_be_interrupted(trained, runs, monkeypatch, tmp_path, capsys):
    """With the model's own data, but drawn with another seed, and longer sequences."""
    data = ("--data.context_length=20", "--data.task_seed=1")
    monkeypatch.setattr("lit_lazy.report.diagnose_checkpoint.REPORT_SECONDS", -1.0)
    monkeypatch.setattr("lit_lazy.measure.diagnostics.TOKENS_AT_ONCE", 20)
    said: list[str] = []
    diagnose(Request(trained, overrides=data, sequences=2, out=tmp_path / "new" / "out", runs=runs), said.append)
    assert [line for line in said if line.startswith("measuring 2 of 2, 60 of 80 tokens done (")]
    assert Diagnostics.load(tmp_path / "new" / "out" / "diagnostics.npz").arrays["sample"].tolist() == [2, 20, 2]
    monkeypatch.setattr("lit_lazy.report.diagnose_checkpoint.measure_all", Mock(side_effect=KeyboardInterrupt))
    assert main(["diagnose", str(trained), "--runs", str(runs)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert sorted(path.name for path in runs.iterdir() if path.is_dir()) == ["mlartifacts"]


def test_data_that_have_changed_since_the_training_are_told(trained, tmp_path, capsys) -> None:
    result = json.loads((trained.parent / RESULT).read_text())
    shutil.copy(trained, tmp_path / FINAL_CHECKPOINT)
    (tmp_path / RESULT).write_text(json.dumps(result | {"fingerprint": "0123456789abcdef"}))
    assert main(["evaluate", str(tmp_path / FINAL_CHECKPOINT)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "its data (backcopy) has changed since its training" in said


def test_the_rest_of_a_diagnosis_is_made(tmp_path: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Loss by position at further lengths, hidden states, and figures of both, in place of those of another model."""
    run(MAMBA, tmp_path / "abcdef", keep_checkpoint=True)
    mamba = tmp_path / "abcdef" / FINAL_CHECKPOINT
    folder = Request(mamba, lengths=(32,), runs=runs).folder
    folder.mkdir()
    for name in ("tau_by_layer.png", "mine.png", "diagnostics.json"):
        (folder / name).write_text("of another model")
    assert main(["diagnose", str(mamba), "--runs", str(runs), "--lengths", "32", "--threads", "1"]) == 0
    found = Diagnostics.load(folder / "diagnostics.npz")
    assert found.prefixes == ["", "init/", "L32/"]
    assert found.arrays["L32/loss/by_position"].shape == (32,)
    assert np.isfinite(found.arrays["hidden/effective_rank"]).all()
    assert not [name for name in found.arrays if "sink" in name or "maps" in name]
    assert json.loads((folder / "diagnostics.json").read_text())["maps"] == []
    assert {path.stem for path in folder.glob("*.png")} == {"rank_profile", "loss_by_length", "mine"}
    printed = capsys.readouterr().out
    assert "effective_rank" in printed
    assert "), in place of an earlier diagnosis\n" in printed
    assert "sink" not in printed
    assert main(["evaluate", str(mamba), "--threads", "1"]) == 0
    assert "loss/val" in capsys.readouterr().out


@pytest.mark.long
def test_table1_end_to_end(runs: Path) -> None:
    """Every row trains; what has no attention has no share of it, and the parameters are within 2 %."""
    command = ["ablate", "run", "table1", "--base", "backcopy_tiny", "--seeds", "0", "--workers", "1"]
    assert main([*command, "--runs", str(runs)]) == 0
    rows = {row.variant: row.metrics for row in read_table(runs / "table1-backcopy_tiny" / "table.json").rows}
    assert list(rows) == ["softmax", "lazy", "RetNet", "Mamba2", "Gated DeltaNet"]
    defined = {name: {key for key, values in row.items() if values} for name, row in rows.items()}
    assert "mass/trigger" in defined["softmax"] & defined["lazy"]
    for name in ("RetNet", "Mamba2", "Gated DeltaNet"):
        assert {key.partition("/")[0] for key in defined[name]} == {"loss", "accuracy", "collapse", "model"}
    sizes = [row["model/parameters"][0] for row in rows.values()]
    assert max(sizes) <= 1.02 * min(sizes)
