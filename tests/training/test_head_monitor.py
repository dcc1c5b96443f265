"""Metrics logged during training: their steps, their values, and that they do not affect the training."""

import pytest
import test_run
import torch

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, SSMax
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.head_monitor import measure_batch
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import DIAGNOSTICS

HEADS = ("watch/first_key_weight", "watch/mass", "watch/cosine", "watch/effective_rank")


def config(attention):
    return test_run.config(attention, val_every=8, checkpoint_every=5)


def logged(folder):
    """The `watch/` metrics of a run by name and step. Fails if a value is logged twice."""
    found: dict[str, dict[int, float]] = {}
    for line in read_lines(folder / METRICS):
        for name, value in line.metrics.items():
            if name.startswith("watch/"):
                assert line.step not in found.setdefault(name, {}), (name, line.step)
                found[name][line.step] = value
    return found


@pytest.mark.parametrize(
    ("attention", "learned"),
    [(AttentionSpec(Elastic(), LearnedBias()), "tau"), (AttentionSpec(SSMax()), "learned/s"), (AttentionSpec(), None)],
    ids=["elastic", "ssmax", "softmax"],
)
def test_steps_and_figures(tmp_path, attention, learned):
    cfg = config(attention)
    result = run(cfg, tmp_path, logger=MetricFile(tmp_path), keep_checkpoint=True)
    found = logged(tmp_path)
    names = [f"watch/{learned}_{of}" for of in ("layer_0", "layer_1", "min", "max")] if learned else []
    assert found.keys() >= {*HEADS, *names}
    assert ("watch/sparsity" in found) == ("watch/tau_min" in found) == (learned == "tau")
    for name in found:
        if name != "watch/first_key_share":  # undefined while no weight survives
            assert sorted(found[name]) == [0, 1, 2, 4, 8, 16], name
    source = cfg.data.load()
    untrained = LitLM.create(cfg, source.vocab_size, source.context_length)
    tokens = source.validation.sequences[:4, :-1].long()
    assert measure_batch(untrained.model, tokens) == {name: values[0] for name, values in found.items() if 0 in values}
    kept = Diagnostics.load(tmp_path / DIAGNOSTICS).arrays
    if learned is None:
        assert "watch/step" not in kept
        assert found["watch/mass"] == pytest.approx(dict.fromkeys(found["watch/mass"], 1.0))
        return
    assert kept["watch/step"].tolist() == [0, 1, 2, 4, 8, 16]
    values = kept[f"watch/{learned}"]
    assert values.shape == (6, 2, 2)
    expected = [*values.mean(2).T, values.min((1, 2)), values.max((1, 2))]
    for name, curve in zip(names, expected, strict=True):
        assert list(found[name].values()) == pytest.approx(curve), name
        assert found[name][0] != found[name][16]
    assert {f"{when}{learned}/{of}" for when in ("", "init/") for of in ("min", "mean", "max")} <= result.metrics.keys()


@pytest.mark.parametrize("tau", [0.7, 1.4])
def test_figures_are_those_of_the_model(tau):
    """First-key weight and mass, of layers and quarters, against weights from the layers' queries and keys."""
    cfg = config(AttentionSpec(Elastic(tau_init=tau), LearnedBias(init_std=1.0)))
    source = cfg.data.load()
    model = LitLM.create(cfg, source.vocab_size, source.context_length).model.double().train()
    model.attentions[1].normaliser.tau.data[0] = 100.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, weights = source.validation.sequences[:3, :-1].long(), []

    def write_out(normaliser, inputs):
        weights.append(normaliser.compute_weights(inputs[0]))

    for layer in model.attentions:
        layer.normaliser.register_forward_pre_hook(write_out)
    found = measure_batch(model, tokens)
    mass = torch.stack([layer.mass for layer in weights])
    first = torch.stack([layer.w[..., 0] for layer in weights])[..., 7:]
    expected = {
        "mass": mass.mean(),
        "first_key_weight": first.mean(),
        "first_key_share": first.sum() / mass[..., 7:].sum(),
        "empty_rows": (mass == 0).double().mean(),
        "dead_heads": 0.25,
        **{f"mass_layer_{layer}": mass[layer].mean() for layer in range(2)},
        **{f"mass_quarter_{i + 1}": mass[..., 4 * i : 4 * i + 4].mean() for i in range(4)},
    }
    for name, value in expected.items():
        assert found[f"watch/{name}"] == pytest.approx(float(value), rel=1e-5), name
    least = 0.25 + (0.75 / 16 if tau >= 1 else 0)
    assert found["watch/empty_rows"] >= least, "one head of four, and row 1, whose weight is 1 - tau"
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.blocks[-1]._forward_hooks


def test_watching_changes_nothing(finished, tmp_path):
    """The weights equal those of a run without a logger, which watches nothing."""
    run(test_run.config(), tmp_path, keep_checkpoint=True)
    test_run.assert_same_run(finished, tmp_path)
