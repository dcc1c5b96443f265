"""Metrics logged during training: their steps, their values, and that they do not affect the training."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import test_run
import torch

from flash_lazy import Rows
from lit_lazy.attention import AttentionSpec, Elastic, LayerShape, LearnedBias, Normaliser, NormaliserModule, Softmax
from lit_lazy.config.schema import RunConfig
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.training.callbacks_and_loggers import METRICS, MetricFile, read_lines
from lit_lazy.training.head_monitor import HeadMonitor, measure_batch
from lit_lazy.training.module import LitLM
from lit_lazy.training.run import run
from lit_lazy.training.run_folder import DIAGNOSTICS

HEADS = ("watch/first_key_weight", "watch/mass", "watch/cosine", "watch/effective_rank")
TAUS = ("watch/tau_layer_0", "watch/tau_layer_1", "watch/tau_min", "watch/tau_max")


def config(attention: AttentionSpec) -> RunConfig:
    return test_run.config(attention, val_every=8, checkpoint_every=5)


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The `watch/` metrics of a run by name and step. Fails if a value is logged twice."""
    found: dict[str, dict[int, float]] = {}
    for line in read_lines(folder / METRICS):
        for name, value in line.metrics.items():
            if name.startswith("watch/"):
                assert line.step not in found.setdefault(name, {}), (name, line.step)
                found[name][line.step] = value
    return found


@pytest.mark.parametrize("attention", [AttentionSpec(Elastic(), LearnedBias()), AttentionSpec(Softmax())], ids=str)
def test_steps_and_figures(tmp_path: Path, attention: AttentionSpec) -> None:
    cfg = config(attention)
    run(cfg, tmp_path, logger=MetricFile(tmp_path), keep_checkpoint=True)
    found = logged(tmp_path)
    elastic = isinstance(attention.normaliser, Elastic)
    assert found.keys() >= {*HEADS, *(TAUS if elastic else ())}
    assert ("watch/sparsity" in found) == ("watch/tau_min" in found) == elastic
    for name in found:
        if name != "watch/first_key_share":  # undefined while no weight survives
            assert sorted(found[name]) == [0, 1, 2, 4, 8, 16], name
    source = cfg.data.load()
    untrained = LitLM.create(cfg, source.vocab_size, source.context_length)
    tokens = source.validation.sequences[:4, :-1].long()
    assert measure_batch(untrained.model, tokens) == {name: values[0] for name, values in found.items() if 0 in values}
    kept = Diagnostics.load(tmp_path / DIAGNOSTICS).arrays
    assert ("watch/tau" in kept) == elastic
    if elastic:
        assert {found[name][0] for name in TAUS} == {1.0}
        assert found["watch/tau_min"][16] < 1.0
        assert kept["watch/step"].tolist() == [0, 1, 2, 4, 8, 16]
        tau = kept["watch/tau"]
        assert tau.shape == (6, 2, 2)
        expected = [*tau.mean(2).T, tau.min((1, 2)), tau.max((1, 2))]
        for name, values in zip(TAUS, expected, strict=True):
            assert list(found[name].values()) == pytest.approx(values), name
    else:
        assert found["watch/mass"] == pytest.approx(dict.fromkeys(found["watch/mass"], 1.0))


@pytest.mark.parametrize("tau", [0.7, 1.4])
def test_figures_are_those_of_the_model(tau: float) -> None:
    """First-key weight and mass, of layers and quarters, against weights from the layers' queries and keys."""
    cfg = config(AttentionSpec(Elastic(tau_init=tau), LearnedBias(init_std=1.0)))
    source = cfg.data.load()
    model = LitLM.create(cfg, source.vocab_size, source.context_length).model.double().train()
    model.attentions[1].normaliser.tau.data[0] = 100.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokens, weights = source.validation.sequences[:3, :-1].long(), []

    def write_out(normaliser, inputs):
        weights.append(normaliser.compute_weights(inputs[0]))

    hooks = [layer.normaliser.register_forward_pre_hook(write_out) for layer in model.attentions]
    found = measure_batch(model, tokens)
    for hook in hooks:
        hook.remove()
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


def test_watching_changes_nothing(finished: Path, tmp_path: Path) -> None:
    """The weights equal those of a run without a logger, which watches nothing."""
    run(test_run.config(), tmp_path, keep_checkpoint=True)
    test_run.assert_same_run(finished, tmp_path)


def test_the_step_of_learning_is_the_first_validated_below_the_mark() -> None:
    source = config(AttentionSpec()).data.load()
    marked = replace(source, info={"optimum_nats": 1.0, "chance_nats": 2.0})
    monitor = HeadMonitor(marked)
    assert monitor.find_steps_to_learn(20) == {"steps/to_learn": 20}
    monitor.losses.update({5: 1.6, 10: 1.4, 15: 1.6, 20: 1.2})
    assert monitor.find_steps_to_learn(20) == {"steps/to_learn": 10}
    resumed = HeadMonitor(marked)
    resumed.load_state_dict(monitor.state_dict())
    assert resumed.find_steps_to_learn(20) == {"steps/to_learn": 10}
    assert HeadMonitor(replace(source, info={})).find_steps_to_learn(20) == {}


class AboveMean(Normaliser):
    """max(p - lambda mean p, 0): Elastic, as the n keys that a row sees have the mean weight 1/n."""

    def build(self, shape: LayerShape) -> NormaliserModule:
        return AboveMeanModule(shape.n_heads)


class AboveMeanModule(NormaliserModule):
    can_zero = True

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.cut = torch.nn.Parameter(torch.ones(heads, 1, 1))

    def weights(self, scores: torch.Tensor, rows: Rows) -> torch.Tensor:
        p = scores.softmax(-1)
        return (p - self.cut * p.sum(-1, keepdim=True) / rows.n).relu()


def test_a_custom_rule_that_is_elastic_has_its_curves(tmp_path: Path) -> None:
    """Of its parameter, whose name and shape are its own, in logs and diagnostics; and its numbers in the result."""
    results, curves, arrays = [], [], []
    for rule in (Elastic(), AboveMean()):
        folder = tmp_path / type(rule).__name__
        results.append(run(config(AttentionSpec(rule)), folder, logger=MetricFile(folder)).metrics)
        named = {name.replace("learned/cut", "tau"): curve for name, curve in logged(folder).items()}
        curves.append({f"{name} {step}": value for name, curve in named.items() for step, value in curve.items()})
        arrays.append(Diagnostics.load(folder / DIAGNOSTICS).arrays)
    assert curves[1] == pytest.approx(curves[0], abs=1e-4)
    assert abs(curves[0]["watch/tau_min 16"] - 1) > 1e-2
    np.testing.assert_allclose(arrays[1]["watch/learned/cut"], arrays[0]["watch/tau"], atol=1e-4)
    own = {name.replace("learned/cut", "tau"): value for name, value in results[1].items() if "learned/cut" in name}
    assert own == pytest.approx({name: value for name, value in results[0].items() if "tau/" in name}, abs=1e-4)
    assert len(own) == 6
