"""Diagnostics of a model: equal to dense fp64 matrices for any batches, and without effect on the model."""

import math
from dataclasses import dataclass
from statistics import NormalDist
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    ClippedSoftmax,
    Differential,
    Elastic,
    LearnedAbsolute,
    LearnedBias,
    NoPosition,
    Normaliser,
    NormaliserModule,
    OffByOne,
    Relu,
    Rope,
    Softmax,
    Softpick,
    T5Bias,
)
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure import diagnostics
from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.diagnostic_arrays import Diagnostics
from lit_lazy.measure.diagnostics import Maps, measure, sample_validation
from lit_lazy.training.head_monitor import measure_batch
from lit_lazy.training.module import LitLM

T, VOCABULARY, SEQUENCES = 20, 17, 5


def make(attention, position=None, n_layers=2, n_kv_heads=2, seed=0):
    """With weights so large that scores span some nats, heads differ and offsets cut."""
    sizes = {"d_model": 16, "n_heads": 4, "d_ff": 24, "n_layers": n_layers, "n_kv_heads": n_kv_heads}
    model = ModelConfig(**sizes, attention=attention, position=position or Rope(), init_std=0.4)
    data = Backcopy(vocab_size=VOCABULARY - 1, context_length=T)
    return LitLM.create(RunConfig(data, model, seed=seed), VOCABULARY, T)


def draw(length=T, n=SEQUENCES):
    ids = torch.randint(VOCABULARY, (n, length + 1), generator=torch.Generator().manual_seed(1))
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


LAZY = AttentionSpec(Elastic(), LearnedBias(length=7, init_std=1.0))
SPECS = {
    "lazy": (LAZY, None),
    "renormalised": (AttentionSpec(Elastic(0.5, "seq_len", renormalise=True), T5Bias()), NoPosition()),
    "per token": (AttentionSpec(Elastic(0.7, "per_token"), LearnedBias(init_std=1.0), window=6), LearnedAbsolute()),
    "softmax": (AttentionSpec(Softmax(), Alibi(), window=9), None),
}


class Dense:
    """The dense matrices of each layer's rule in a pass, and its hidden states."""

    def __init__(self, module, tokens, hidden_keys=0):
        model = module.model
        self.w, self.mass, self.scores, self.zero, self.v, self.thetas, self.hidden = ([] for _ in range(7))

        def read(rule, inputs):
            (call,) = inputs
            found = rule.compute_weights(call)
            theta = rule.theta(found.rows)
            self.visible = found.rows.visible[0, 0]
            self.w.append(found.w)
            self.mass.append(found.mass)
            self.scores.append(found.scores)
            self.zero.append((found.w == 0) & self.visible)
            self.v.append(call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1))
            self.thetas.append(None if theta is None else theta[0, ..., 0].expand(call.q.shape[1:3]))

        hooks = [layer.normaliser.register_forward_pre_hook(read) for layer in model.attentions]
        for part in (*model.blocks, model.norm):
            hooks.append(part.register_forward_pre_hook(lambda _, inputs: self.hidden.append(inputs[0])))
        seen = torch.ones_like(tokens, dtype=torch.bool)
        seen[:, :hidden_keys] = False
        self.logits = model(tokens, key_mask=seen)
        for hook in hooks:
            hook.remove()

    def nll(self, targets):
        return -self.logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]


def null_zeros(scores, theta, visible):
    """Zeros that Gaussian scores would have in each row from position 8 on, `[B, H, T - 7]`."""
    found = torch.zeros(*scores.shape[:2], T - 7, dtype=torch.float64)
    for b, h, i in np.ndindex(found.shape):
        seen = scores[b, h, i + 7][visible[i + 7]]
        strike, s = len(seen) * theta[h, i + 7].item(), seen.std().item()
        found[b, h, i] = len(seen) * (1 - NormalDist().cdf(-math.log(strike) / s - s / 2))
    return found


def expected(module, batch):
    """The arrays, by loops over dense matrices."""
    dense, cuts = Dense(module, batch["tokens"]), isinstance(module.cfg.model.attention.normaliser, Elastic)
    heads = dense.w[0].shape[1]
    found: dict[str, list[Tensor]] = {}

    def add(name, value):
        found.setdefault(name, []).append(value)

    layers = dense.w, dense.mass, dense.scores, dense.zero, dense.v, dense.thetas
    for w, mass, scores, zero, v, theta in zip(*layers, strict=True):
        weight, share, rate = (torch.zeros(heads, 8, dtype=torch.float64) for _ in range(3))
        for key in range(8):
            below = w[:, :, key:, key]
            weight[:, key] = below.mean((0, 2))
            share[:, key] = below.sum((0, 2)) / w[:, :, key:].sum((0, 2, 3))
            rate[:, key] = (below.mean(-1) > 0.3).double().mean(0)
        add("sink/weight", weight)
        add("sink/share", share)
        add("sink/rate", rate)
        size = v.norm(dim=-1)
        add("sink/value_norm", (size[..., :8] / size.mean(-1, keepdim=True)).mean(0))
        add("mass/row", mass.mean(0))
        before = w * (mass / w.sum(-1).masked_fill(mass == 0, 1))[..., None]
        add("mass/first_key", before[..., 0].mean(0))
        add("mass/empty_rows", (mass == 0).double().mean((0, 2)))
        n = len(w) * dense.visible.sum()
        if cuts:
            add("sparsity/zero", zero.sum((0, 2, 3)) / n)
        add("sparsity/small", ((w <= 1e-5) & dense.visible).sum((0, 2, 3)) / n)
        a = w / w.sum(-1, keepdim=True)
        alive = mass > 0
        entropy = -(a * a.clamp(min=1e-300).log()).sum(-1)
        keys = [entropy[:, h][alive[:, h]].exp().mean() for h in range(heads)]
        add("entropy/keys", torch.stack(keys))
        variances = [[scores[:, h, i][:, dense.visible[i]].var(-1) for i in range(7, T)] for h in range(heads)]
        if dense.visible[-1].sum() >= 8:
            add("scores/spread", torch.stack([torch.stack(rows).mean().sqrt() for rows in variances]))
            if cuts:
                null = null_zeros(scores, theta, dense.visible)
                late = len(w) * dense.visible[7:].sum()
                add("sparsity/null", null.sum((0, 2)) / late)
                add("sparsity/over_null", (zero[:, :, 7:].sum((0, 2, 3)) - null.sum((0, 2))) / late)
    for x in dense.hidden:
        directions = x / x.norm(dim=-1, keepdim=True)
        cosines = directions @ directions.mT
        add("hidden/cosine", ((cosines.sum((1, 2)) - T) / (T * (T - 1))).mean())
        add("hidden/max_abs", x.abs().max())
    arrays = {name: torch.stack(values) for name, values in found.items()}
    once, twice = batch["tokens"][:, :-1], torch.cat((batch["tokens"][:, :-1], batch["tokens"][:, -2:-1]), 1)
    pairs = zip(Dense(module, once).hidden, Dense(module, twice).hidden, strict=True)
    arrays["hidden/repeated_gap"] = torch.stack(
        [((y[:, -1] - z[:, -1]).norm(dim=-1) / y[:, -1].norm(dim=-1)).mean() for y, z in pairs]
    )
    nll = dense.nll(batch["targets"])
    arrays["loss/by_position"] = nll.mean(0)
    hidden = [Dense(module, batch["tokens"], keys).nll(batch["targets"]) for keys in range(1, 5)]
    arrays["loss/evicted"] = torch.stack([(each - nll)[:, 8:].mean() for each in hidden])
    return arrays


@pytest.mark.parametrize("name", SPECS)
def test_arrays_equal_those_of_dense_matrices(name):
    attention, position = SPECS[name]
    module, batch = make(attention, position).double(), draw()
    with torch.no_grad():
        wanted, dense = expected(module, batch), Dense(module, batch["tokens"][:1])
    measured = measure(module.model, [batch], Maps(layers=(1, 0), heads=(3, 0))).arrays
    for array, values in wanted.items():
        np.testing.assert_allclose(measured[array], values.numpy(), rtol=2e-6, atol=1e-7, err_msg=array)
    assert measured["maps/heads"].tolist() == [[1, 3], [1, 0], [0, 3], [0, 0]]
    seen = [dense.w[layer][0, head].masked_fill(~dense.visible, torch.nan) for layer, head in measured["maps/heads"]]
    maps = torch.stack(seen).numpy()
    np.testing.assert_allclose(measured["maps/weights"], maps, rtol=1e-3, atol=1e-7)
    assert ((measured["maps/weights"] == 0) == (maps == 0)).all()
    others = {"maps/weights": np.float16, "maps/heads": np.int64, "sample": np.int64, "context": np.int64}
    assert all(array.dtype == others.get(array_name, np.float32) for array_name, array in measured.items())
    assert measured["sample"].tolist() == [SEQUENCES, T, 2]
    assert ("tau" in measured) == isinstance(attention.normaliser, Elastic)
    assert np.isnan(measured["sparsity/zero"]).all() == (name == "softmax")
    assert np.isnan(measured["sparsity/null"]).all() == (name in ("softmax", "per token"))  # a window of 6 keys


@torch.no_grad()
@pytest.mark.parametrize(
    ("attention", "position"),
    [*SPECS.values(), (AttentionSpec(Elastic(-0.5), Alibi(), window=6), None)],
    ids=[*SPECS, "negative"],
)
def test_ratios_equal_those_of_dense_matrices(attention, position):
    """`AttentionMetrics` of groups of rows, in one batch or several."""
    module, tokens = make(attention, position).double(), draw()["tokens"]
    model, rows = module.model, {"rare": tokens < 6, "other": tokens >= 6}
    whole, parts = (AttentionMetrics(model.attentions, tuple(rows)) for _ in range(2))
    whole.update(model.compute_residual(tokens, with_stats=True)[1], rows)
    for part in torch.arange(SEQUENCES).split(2):
        stats = model.compute_residual(tokens[part], with_stats=True)[1]
        parts.update(stats, {name: mask[part] for name, mask in rows.items()})
    dense = Dense(module, tokens)
    w, mass = torch.stack(dense.w).transpose(2, 3), torch.stack(dense.mass).transpose(2, 3)  # [layer, B, T, H, ...]
    expected = {}
    if isinstance(attention.normaliser, Elastic):
        zeros = torch.stack(dense.zero)
        expected["sparsity/zero"] = zeros.sum() / (zeros.shape[:3].numel() * dense.visible.sum())
    for group, mask in rows.items():
        late = mask & (torch.arange(T) >= 7)
        first = w[:, late][..., 0]
        expected[f"mass/{group}"] = mass[:, mask].mean()
        expected[f"sink/first_key_weight_{group}"] = first.mean()
        expected[f"sink/first_key_share_{group}"] = first.sum() / w[:, late].sum()
    expected = {name: float(value) for name, value in expected.items()}
    assert whole.compute() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert parts.compute() == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_the_cut_into_batches_changes_nothing(monkeypatch):
    module, batch = make(LAZY).double(), draw()
    whole = measure(module.model, [batch]).arrays
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 3), slice(3, 4), slice(4, 5))]
    monkeypatch.setattr(diagnostics, "TOKENS_AT_ONCE", 2 * T)
    for cut in (
        measure(module.model, parts).arrays,
        measure(module.model, [*parts, draw(n=3)], sample=SEQUENCES).arrays,
    ):
        assert cut.keys() == whole.keys()
        for name, array in whole.items():
            np.testing.assert_allclose(cut[name], array, rtol=1e-6, atol=1e-9, err_msg=name)
    fewer = measure(module.model, parts, sample=3).arrays
    assert fewer["sample"][0] == 3
    assert not np.allclose(fewer["loss/by_position"], whole["loss/by_position"])


def test_only_a_threshold_over_n_feels_whether_n_is_held():
    """A softmax has no theta; that of `constant` does not depend on n; that of `per_query` is lower."""
    for normaliser, differs in ((Softmax(), False), (Elastic(0.2, "constant"), False), (Elastic(), True)):
        arrays = measure(make(AttentionSpec(normaliser)).double().model, [draw()]).arrays
        assert (abs(arrays["loss/evicted_n_held"] - arrays["loss/evicted"][3]) > 1e-6) == differs


def state(module):
    """All state that must not change, except tensors."""
    return {
        "modes": [part.training for part in module.modules()],
        "hooks": [len(part._forward_pre_hooks) + len(part._forward_hooks) for part in module.modules()],
        "backends": [attention.backend for attention in module.model.attentions],
        "gradients": [parameter.grad is None and parameter.requires_grad for parameter in module.parameters()],
        "random": torch.get_rng_state().tolist(),
        "tensors": {name: x.tolist() for name, x in module.state_dict().items()},
    }


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_stays_as_it_was(fails, monkeypatch):
    module = make(LAZY)
    module.train()
    module.model.blocks[1].eval()
    module.model.attentions[0].backend = "reference"
    before = state(module)
    if fails:
        broken = Mock(side_effect=RuntimeError("broken"))
        monkeypatch.setattr(type(module.model.attentions[1].normaliser), "compute_weights", broken)
        with pytest.raises(RuntimeError, match="broken"):
            measure(module.model, [draw()])
    else:
        measure(module.model, [draw()])
    assert state(module) == before


def test_maps_are_those_of_the_strongest_first_key():
    share = np.full((9, 3), np.nan)
    share[:, 1] = 0.1
    share[4] = [0.2, 0.3, 0.4]
    share[8] = np.nan
    assert Maps().choose(share) == [(0, 1), (3, 1), (5, 1), (8, 0)]
    assert Maps(layers=(4,)).choose(share) == [(4, 2)]
    assert Maps(heads=(0, 2)).choose(share[:2]) == [(0, 0), (0, 2), (1, 0), (1, 2)]
    assert "maps/heads" not in measure(make(LAZY).model, [draw()], None).arrays
    for maps, named in (
        (Maps(layers=(0, 2)), "Maps.layers 2: the model has 2 layers; choose from 0 to 1"),
        (Maps(heads=(4,)), "Maps.heads 4: the model has 4 heads; choose from 0 to 3"),
    ):
        with pytest.raises(ValueError, match=f"^{named}$"):
            measure(make(LAZY).model, [draw()], maps)


def test_arrays_survive_the_file(tmp_path):
    one, other = (make(AttentionSpec(Softmax()), seed=seed).model for seed in (0, 1))
    parts = {"": measure(one, [draw()]), "init/": measure(other, [draw()], None)}
    joined = Diagnostics.merge(parts)
    joined.save(tmp_path / "diagnostics.npz")
    read = Diagnostics.load(tmp_path / "diagnostics.npz")
    assert list(read.arrays) == list(joined.arrays)
    for name, array in joined.arrays.items():
        assert read.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(read.arrays[name], array)
    assert read.prefixes == ["", "init/"]
    initial = {f"init/{name}": value for name, value in parts["init/"].scalars().items()}
    assert read.scalars() == joined.scalars() == parts[""].scalars() | initial
    assert joined.metrics().items() > joined.scalars().items()
    assert joined.metrics()["init/mass/all"] == pytest.approx(float(np.nanmean(joined.arrays["init/mass/row"])))
    assert "init/maps/weights" not in joined.arrays


def test_a_file_that_would_run_code_or_expands_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_lazy.measure.diagnostic_arrays.MOST_BYTES", 2**20)
    np.savez(tmp_path / "code.npz", sample=np.array([print], dtype=object))
    np.savez_compressed(tmp_path / "large.npz", **{name: np.zeros(2**19, np.uint8) for name in "abc"})
    for name, message in (("code", "allow_pickle=False"), ("large", "^its arrays expand to more than 1 MiB$")):
        with pytest.raises(ValueError, match=message):
            Diagnostics.load(tmp_path / f"{name}.npz")


SCALARS = {
    "sink/rate": lambda x: x["sink/rate"][..., 0].mean(),
    "sink/rate_share": lambda x: x["sink/rate_share"][..., 0].mean(),
    "sink/value_norm": lambda x: x["sink/value_norm"][..., 0].mean(),
    "sink/eviction": lambda x: x["loss/evicted"][3],
    "sink/eviction_n_held": lambda x: x["loss/evicted_n_held"],
    "mass/dead_heads": lambda x: x["mass/dead"].mean(),
    "collapse/effective_rank_slope": lambda x: np.polyfit([0, 1, 2], x["hidden/effective_rank"], 1)[0],
    "collapse/max_abs": lambda x: x["hidden/max_abs"].max(),
    "collapse/max_over_median": lambda x: x["hidden/max_over_median"].max(),
    **{
        f"collapse/{name}": lambda x, name=name: x[f"hidden/{name}"][2]
        for name in ("cosine", "effective_rank", "rank_residual", "kurtosis", "repeated_gap")
    },
    **{
        name: lambda x, name=name: np.nanmean(x[name])  # without heads on which it is undefined
        for name in (
            *("sink/no_operation", "sink/broadcast", "mass/empty_rows", "sparsity/small", "sparsity/over_null"),
            *("entropy/keys", "scores/spread", "bias/alibi_distance"),
        )
    },
}


def test_scalars_are_made_of_the_arrays():
    module = make(LAZY).double()
    with torch.no_grad():
        module.model.attentions[0].normaliser.tau[1] = 100.0  # above T: no weight survives
    arrays = measure(module.model, [draw()]).arrays
    assert np.isnan(arrays["entropy/keys"]).sum() == 1
    scalars = Diagnostics(arrays).scalars()
    assert scalars == pytest.approx({name: make_it(arrays) for name, make_it in SCALARS.items()}, rel=1e-6)
    assert scalars["mass/dead_heads"] == pytest.approx(1 / 8)
    short = measure(module.model, [draw(length=8)]).arrays  # all keys are among the first
    assert np.isnan(short["loss/evicted"]).all()
    assert np.isfinite(short["loss/by_position"]).all()


def test_empty_tiles_are_a_metric():
    """If each token sees only itself, 6 of 10 causal tiles of 64 are empty, and 1 of 3 of 128."""
    model = make(AttentionSpec(Elastic(), Alibi(slopes=(100.0,))), NoPosition(), n_layers=1).model
    batch = draw(256, n=2)
    scalars = Diagnostics(measure(model, [batch]).arrays).scalars()
    assert (scalars["sparsity/block_64"], scalars["sparsity/block_128"]) == pytest.approx((6 / 10, 1 / 3))


def test_a_sample_is_spread_over_the_validation_set():
    source = Backcopy(vocab_size=16, context_length=8, train_sequences=1, validation_sequences=30).load()
    everything = source.validation.__getitems__(list(range(30)))["tokens"]
    assert torch.equal(sample_validation(source, 3)[0]["tokens"], everything[[0, 10, 20]])
    assert torch.equal(sample_validation(source)[0]["tokens"], everything)


def measure_rule(normaliser):
    """A model with a rule, its ratios on all rows, and its diagnostics."""
    model, batch = make(AttentionSpec(normaliser, LearnedBias(init_std=0.5)), n_kv_heads=4).model, draw()
    metrics = AttentionMetrics(model.attentions)
    with torch.no_grad():
        stats = model.compute_residual(batch["tokens"], with_stats=True)[1]
    metrics.update(stats, {"all": torch.ones_like(batch["tokens"], dtype=torch.bool)})
    return model, metrics.compute(), measure(model, [batch])


def test_signed_weights_have_no_shares_entropy_or_sparsity():
    _, ratios, diagnostics = measure_rule(Differential())
    arrays = diagnostics.arrays
    assert set(ratios) == {"sink/first_key_weight", "mass/all"}
    for name in ("sink/share", "sink/rate_share", "entropy/keys", "sparsity/zero", "sparsity/small", "sparsity/null"):
        assert np.isnan(arrays[name]).all(), name
    for name in ("sink/weight", "sink/rate", "mass/row", "scores/spread", "loss/by_position"):
        assert np.isfinite(arrays[name]).all(), name
    assert not [name for name in diagnostics.scalars() if name.startswith(("entropy", "sparsity"))]
    assert (arrays["maps/weights"] < 0).any()


class Cancelling(NormaliserModule):
    """From row 3 on, a weight on the own key and its opposite on the first, of sizes that float16 cannot hold."""

    signed = can_zero = True

    def weights(self, scores, rows):
        size = torch.where(rows.position % 2 == 0, 1e-9, 1e6) * (rows.position > 2)
        w = size * ((rows.distance == 0).to(scores.dtype) - (rows.distance == rows.position - 1).to(scores.dtype))
        return w.to(scores.dtype).expand_as(scores) * rows.visible


@dataclass(frozen=True)
class OwnCancelling(Normaliser):
    def build(self, shape):  # noqa: ARG002
        return Cancelling()


def test_weights_that_cancel_are_weights():
    """Neither a row nor a head is empty by its sum, and a map shows whatever is not 0."""
    model, ratios, diagnostics = measure_rule(OwnCancelling())
    arrays, length = diagnostics.arrays, model.context_length
    np.testing.assert_allclose(arrays["mass/empty_rows"], 2 / length)
    assert not arrays["mass/dead"].any()
    np.testing.assert_allclose(arrays["mass/first_key"][..., 2:4], [[[-1e6, -1e-9]] * 4] * 2, rtol=1e-5)
    assert np.isfinite(shown := arrays["maps/weights"][:, 2:, 0]).all()
    assert (shown < 0).all()
    assert "watch/empty_rows" not in ratios
    found = measure_batch(model, draw()["tokens"])
    assert found["watch/empty_rows"] == pytest.approx(2 / length)
    assert found["watch/dead_heads"] == 0


@pytest.mark.parametrize(
    ("normaliser", "cuts"),
    [(Softpick(), True), (Relu(), True), (ClippedSoftmax(), True), (Softmax(), False), (OffByOne(), False)],
    ids=repr,
)
def test_a_rule_that_cuts_has_a_sparsity_and_no_null_model(normaliser, cuts):
    """By its declaration, whatever its class."""
    model, ratios, diagnostics = measure_rule(normaliser)
    found = []
    for layer in model.attentions:
        layer.normaliser.register_forward_pre_hook(lambda rule, args: found.append(rule.compute_weights(args[0])))
    with torch.no_grad():
        model(draw()["tokens"])
    zeros = sum(((x.w == 0) & x.rows.visible).sum().item() for x in found)
    share = zeros / sum(x.rows.visible.expand_as(x.w).sum().item() for x in found)
    assert ("sparsity/zero" in ratios) == (0.1 < share < 0.95) == cuts
    assert ratios.get("sparsity/zero", share) == pytest.approx(share)
    assert diagnostics.arrays["sparsity/zero"].mean() == pytest.approx(share if cuts else np.nan, abs=1e-6, nan_ok=True)
    assert np.isnan(diagnostics.arrays["sparsity/null"]).all()


def test_a_layer_whose_tau_is_0_counts_in_the_sparsity():
    """As at the smallest tau, which cuts as little."""
    model, found = make(LAZY).model, []
    for tau in (0.0, 1e-30):
        model.attentions[1].normaliser.tau.data.fill_(tau)
        found.append({name: x for name, x in measure(model, [draw()]).metrics().items() if name.startswith("sparsity")})
    assert found[0] == pytest.approx(found[1])
    assert 0.1 < found[0]["sparsity/zero"] < 0.5
    assert "sparsity/over_null" in found[0]
