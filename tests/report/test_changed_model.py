"""A trained model under other settings: `diagnose --model...`, `Model.with_`, and thresholds raised within a limit."""

import json
import re
from pathlib import Path

import pytest
import torch
from stores import make_runs

from lit_lazy.api import Model, load, train
from lit_lazy.attention import (
    Alibi,
    Elastic,
    LearnedAbsolute,
    LearnedBias,
    OffByOne,
    OutputGate,
    RetNet,
    SinkLogit,
    Softmax,
)
from lit_lazy.command.main import main
from lit_lazy.command.options import CHANGES
from lit_lazy.measure import raise_thresholds
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import sample_validation
from lit_lazy.model.loss import mean_nll, token_nll

NORMALISER = "model.attention.normaliser"
TOKENS = [0, 5, 3, 9, 5, 3, 2, 5]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    runs = make_runs(tmp_path_factory.mktemp("changed"), empty_store)
    return train("backcopy_tiny", runs=runs, threads=1).checkpoint


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Model:
    return load(checkpoint)


def loss_of(model: Model) -> float:
    (batch,) = sample_validation(model._load_data())
    with torch.no_grad():
        return mean_nll(token_nll(model.decoder(batch["tokens"]), batch["targets"]), batch["targets"]).item()


def test_softmax_is_elastic_at_tau_0_with_a_bias_of_0(model: Model) -> None:
    changed = model.with_({NORMALISER: Elastic(tau_init=0.0), "model.attention.bias": LearnedBias()})
    torch.testing.assert_close(changed.weights(TOKENS), model.weights(TOKENS))
    assert loss_of(changed) == pytest.approx(loss_of(model), abs=1e-6)


def test_weights_under_a_threshold_are_cut_by_it(model: Model) -> None:
    p, w = (m.weights(TOKENS) for m in (model, model.with_({NORMALISER: Elastic(tau_init=0.5)})))
    n = torch.arange(1, len(TOKENS) + 1)[:, None]
    torch.testing.assert_close(w[0], (p[0] - 0.5 / n).clamp(min=0))  # one layer, so equal scores


def test_a_change_leaves_the_model_as_it_was_and_shares_its_weights(model: Model) -> None:
    before = {name: x.clone() for name, x in model.decoder.state_dict().items()}
    changed = model.with_({NORMALISER: Elastic(), "model.attention.gate": OutputGate()})
    assert changed.decoder.embedding.weight.data_ptr() == model.decoder.embedding.weight.data_ptr()
    assert changed.decoder.head.weight is changed.decoder.embedding.weight
    changed.raise_thresholds(0.01)
    assert isinstance(model.config.model.attention.normaliser, Softmax)
    for name, x in model.decoder.state_dict().items():
        assert torch.equal(x, before[name]), name
    again = changed.with_({NORMALISER: Softmax(), "model.attention.gate": model.config.model.attention.gate})
    torch.testing.assert_close(again.weights(TOKENS), model.weights(TOKENS))


def test_weights_of_a_part_of_another_class_are_not_taken(model: Model) -> None:
    """Whatever their names and shapes: both rules have a `sink`."""
    sink, off = SinkLogit(init=1.5), OffByOne()
    for rules, expected in (([sink], 1.5), ([sink, off], 0), ([off, SinkLogit(init=2.0)], 2), ([sink, sink], 1.5)):
        changed = model
        for rule in rules:
            changed = changed.with_({NORMALISER: rule})
        assert (changed.decoder.attentions[0].normaliser.sink == expected).all(), rules


@pytest.mark.parametrize("rise", [0.001, 0.02, 5])
def test_thresholds_rise_until_the_loss_has_by_the_limit(model, rise, caplog) -> None:
    """Or to the largest tau, 4, which is said."""
    changed = model.with_({NORMALISER: Elastic()})
    caplog.clear()
    taus = changed.raise_thresholds(rise)
    assert torch.equal(changed.with_({}).decoder.attentions[0].normaliser.tau, taus[0]), "a change keeps them"
    assert torch.equal(taus, torch.stack([a.normaliser.tau.detach() for a in changed.decoder.attentions]))
    assert bool((taus > 0).all())
    measured = loss_of(changed) - loss_of(model)
    said = f"rise={rise}: not reached; the loss rose by {measured:.4f} nats, and 1 of 1 heads are at the largest tau, 4"
    reached = 0.8 * rise < measured <= rise + 1e-6
    assert reached or bool((taus == 4).all())
    assert caplog.messages == ([] if reached else [said])
    assert reached == (rise == 0.001)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in changed.decoder.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.lr": 0.1}, "train.lr: has no effect on a trained model; set only fields of model and data"),
        ({"model.d_model": 1024}, r"d_model=1024: the trained weights are for \d+; leave it, or train a new model"),
        ({"model.n_layers": 2}, "model.n_layers=2: the trained weights are for 1"),
        ({"model.n_heads": 2}, "model.n_heads=2: the trained weights are for 1"),
        ({"model.tie_embeddings": False}, "model.tie_embeddings=False: the trained weights are for True"),
        ({"model.mixer": RetNet()}, "model.mixer=RetNet"),
        ({"model.position": LearnedAbsolute()}, r"model.position=LearnedAbsolute.*: has weights, .* were not trained"),
        ({f"{NORMALISER}.tau_init": 3.0}, f"{NORMALISER}.tau_init: has no effect on a trained model"),
        ({NORMALISER: Elastic(threshold="per_token")}, r"normaliser.tau: is trained with the shape \[1\], not"),
    ],
)
def test_a_change_that_would_do_nothing_or_undo_training_is_one_line(model, changes, message) -> None:
    lazy = model.with_({NORMALISER: Elastic(), "model.attention.bias": LearnedBias()})
    assert lazy.with_({"model.attention.window": 4}).config.model.attention.window == 4
    with pytest.raises(ValueError, match=message):
        lazy.with_(changes)


def test_thresholds_of_a_model_that_was_trained_with_some_do_not_rise(model, monkeypatch) -> None:
    changed = model.with_({NORMALISER: Elastic(tau_init=1.0)})
    monkeypatch.setattr(
        raise_thresholds, "_make_loss", lambda *_: lambda at: (float((at - 1).square().sum()), 2 * (at - 1))
    )
    with pytest.raises(ValueError, match=r"^rise=0\.1: thresholds rise from 0, .* its own .* 0\.0000, "):
        changed.raise_thresholds(0.1)
    assert bool((changed.decoder.attentions[0].normaliser.tau == 1).all())


def test_thresholds_need_a_tau_per_head(model: Model) -> None:
    for changes in ({}, {NORMALISER: Elastic(threshold="per_token")}):
        with pytest.raises(ValueError, match="has no tau per head; choose Elastic"):
            model.with_(changes).raise_thresholds(0.1)
    for rise in (0, "x", float("nan")):
        with pytest.raises(ValueError, match=re.escape(f"rise={rise!r}: must be a finite number above 0")):
            model.with_({NORMALISER: Elastic()}).raise_thresholds(rise)


def test_the_command_shows_the_model_before_and_after(checkpoint, runs, capsys, monkeypatch) -> None:
    monkeypatch.setattr("lit_lazy.report.diagnose_checkpoint.draw_run_figures", lambda *_: {})
    out = runs / "changed"
    command = ["diagnose", str(checkpoint), "--runs", str(runs), "--out", str(out), "--sequences", "8", "--threads=1"]
    examples = re.findall(r"--[\w.]+=\w+", CHANGES)
    assert len(examples) == 2
    assert main([*command, *examples, "--rise", "0.01"]) == 0
    printed = capsys.readouterr().out
    head = next(line for line in printed.splitlines() if "changed" in line and "before" in line)
    assert head.split() == ["changed", "before"]
    arrays = Diagnostics.load(out / "diagnostics.npz").arrays
    assert arrays["before/mass/row"].mean() == pytest.approx(1, abs=1e-5)
    assert arrays["mass/row"].mean() < 1
    assert "before/tau" not in arrays
    rise = arrays["loss/by_position"].mean() - arrays["before/loss/by_position"].mean()
    assert 0.005 < rise <= 0.01 + 1e-6
    facts = json.loads((out / "diagnostics.json").read_text())
    assert facts["changes"] == [*examples, "--rise=0.01"]
    assert main([*command, *examples, "--train.lr=1"]) == 2
    assert "train.lr: has no effect on a trained model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model.attention.gate": OutputGate()}, "blocks.0.attention.gate.linear.weight"),
        ({NORMALISER: Elastic(), "model.attention.window": 4}, "blocks.0.attention.normaliser.tau"),
        ({"model.attention.bias": Alibi()}, None),
    ],
)
def test_untrained_parameters_are_said(changes, names, model, caplog) -> None:
    changed = model.with_(changes)
    line = f"untrained, at their initial values: {names}; `init_from` starts a training of them"
    assert caplog.messages == ([] if names is None else [line])
    caplog.clear()
    changed.with_({})
    assert not caplog.messages


def test_a_bias_that_the_model_did_not_have_moves_its_scores(model: Model) -> None:
    changed = model.with_({"model.attention.bias": Alibi()})
    p, w = model.weights(TOKENS)[0], changed.weights(TOKENS)[0]
    distance = torch.arange(len(TOKENS))[:, None] - torch.arange(len(TOKENS))
    slopes = changed.decoder.attentions[0].bias(len(TOKENS)).slopes
    assert slopes is not None
    expected = (p.log() - slopes[:, None, None] * distance).softmax(-1)
    torch.testing.assert_close(w, expected)
