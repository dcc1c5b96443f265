"""First-key weight, mass and sparsity against closed forms and against a dense matrix of weights."""

import dataclasses
import math

import pytest
import torch

from flash_lazy import Stats
from lit_lazy.attention import (
    Alibi,
    AttentionCall,
    AttentionSpec,
    Differential,
    Elastic,
    LayerShape,
    LearnedBias,
    NoBias,
    Softmax,
    Softpick,
    SSMax,
)
from lit_lazy.attention.bias import BiasTerms
from lit_lazy.config.schema import ModelConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.evaluation import evaluate
from lit_lazy.model.decoder import DecoderLM

BATCH, HEADS, LENGTH, FIRST = 2, 3, 20, 8
ALL = torch.ones(BATCH, LENGTH, dtype=torch.bool)
N = torch.arange(1, LENGTH + 1.0)


def stats(mass=1.0, first_weight=0.0, zeros=0.0):
    """Row statistics `[B, H, L]` from values that are numbers or `[L]`."""
    fields = (torch.as_tensor(x, dtype=torch.float32).expand(BATCH, HEADS, LENGTH) for x in (mass, first_weight, zeros))
    return Stats(torch.zeros(BATCH, HEADS, LENGTH), *fields)


def measure(*layers, rows=None, can_zero=True, renormalised=False, window=None, signed=False):
    metrics = AttentionMetrics(tuple(rows or ()), can_zero, renormalised, [window] * len(layers), signed)
    metrics.update(layers, rows or {"all": ALL})
    return metrics.compute()


class TestClosedForms:
    def test_all_weight_on_the_first_key(self):
        assert measure(stats(first_weight=1.0), can_zero=False) == {
            "sink/first_key_weight": 1,
            "sink/first_key_share": 1,
            "mass/all": 1,
        }

    def test_uniform_attention(self):
        """Row i has weight 1/i: the mean of 1/i over the rows from the eighth on."""
        measured = measure(stats(first_weight=1 / N))
        expected = sum(1 / i for i in range(FIRST, LENGTH + 1)) / (LENGTH - FIRST + 1)
        assert measured["sink/first_key_weight"] == pytest.approx(expected, rel=1e-6)
        assert measured["sink/first_key_share"] == pytest.approx(expected, rel=1e-6)

    def test_rows_before_the_eighth_do_not_count_for_the_sink_but_for_the_mass(self):
        early, late = (N < FIRST).float(), (N >= FIRST).float()
        measured = measure(stats(mass=early, first_weight=early))
        assert measured["sink/first_key_weight"] == 0
        assert "sink/first_key_share" not in measured
        assert measured["mass/all"] == pytest.approx((FIRST - 1) / LENGTH)
        measured = measure(stats(mass=late, first_weight=late))
        assert measured["sink/first_key_weight"] == measured["sink/first_key_share"] == 1

    def test_rows_without_mass(self):
        """All weights are 0: the mean is 0, the share is absent, and nothing is NaN."""
        assert measure(stats(mass=0.0, zeros=N)) == {"sink/first_key_weight": 0, "mass/all": 0, "sparsity/zero": 1}

    @pytest.mark.parametrize(("mass", "defined"), [(1e-9, False), (1e-3, True)])
    def test_a_share_of_next_to_no_mass_is_undefined(self, mass, defined):
        measured = measure(stats(mass=mass, first_weight=mass / 2))
        assert ("sink/first_key_share" in measured) is defined
        assert measured["sink/first_key_weight"] == pytest.approx(mass / 2)

    def test_a_share_is_a_ratio_of_sums(self):
        """Rows of large mass weigh more than rows of small mass."""
        heavy = (N % 2 == 0).float()
        mass = 0.9 * heavy + 0.1 * (1 - heavy)
        measured = measure(stats(mass=mass, first_weight=0.1 * (1 - heavy)))
        late = N >= FIRST
        n_heavy, n_light = (heavy[late]).sum().item(), (1 - heavy)[late].sum().item()
        assert measured["sink/first_key_share"] == pytest.approx(0.1 * n_light / (0.9 * n_heavy + 0.1 * n_light))

    def test_renormalised_weights_are_shared_among_rows_with_mass(self):
        """Weights of rows with mass sum to 1, so the share is the mean over those rows."""
        alive = (N % 2 == 0).float()
        measured = measure(stats(mass=0.01 * alive, first_weight=0.3 * alive), renormalised=True)
        assert measured["sink/first_key_share"] == pytest.approx(0.3)
        n_alive, n = alive[N >= FIRST].sum().item(), LENGTH - FIRST + 1
        assert measured["sink/first_key_weight"] == pytest.approx(0.3 * n_alive / n)
        assert measured["mass/all"] == pytest.approx(0.005)
        assert "sink/first_key_share" not in measure(stats(mass=0.0), renormalised=True)

    def test_sparsity_is_pooled_over_rows(self):
        """All keys of the longest row and none of the others are 0: n / (1 + .. + n), not 1 / n."""
        measured = measure(stats(zeros=N * (N == LENGTH)))
        assert measured["sparsity/zero"] == pytest.approx(LENGTH / (LENGTH * (LENGTH + 1) / 2))
        assert measure(stats(zeros=N))["sparsity/zero"] == 1
        assert measure(stats(zeros=N - 1))["sparsity/zero"] == pytest.approx(1 - 2 / (LENGTH + 1))

    def test_sparsity_counts_each_layers_own_window(self):
        metrics = AttentionMetrics((), True, False, [6, None])
        metrics.update([stats(zeros=N.clamp(max=6)), stats(zeros=0.0)], {"all": ALL})
        seen = N.clamp(max=6).sum().item()
        assert metrics.compute()["sparsity/zero"] == pytest.approx(seen / (seen + N.sum().item()))

    @pytest.mark.parametrize("window", [1, 6, LENGTH, 99])
    def test_sparsity_counts_the_keys_in_the_window(self, window):
        seen = N.clamp(max=window)
        assert measure(stats(zeros=seen), window=window)["sparsity/zero"] == 1
        assert measure(stats(zeros=1.0), window=window)["sparsity/zero"] == pytest.approx(LENGTH / seen.sum().item())

    def test_without_weights_of_0_there_is_no_sparsity(self):
        assert "sparsity/zero" not in measure(stats(), can_zero=False)

    def test_weights_that_can_be_negative_have_no_shares_and_no_sparsity(self):
        measured = measure(stats(mass=0.5, first_weight=-0.1), signed=True)
        assert measured == pytest.approx({"sink/first_key_weight": -0.1, "mass/all": 0.5})

    def test_layers_are_pooled(self):
        assert measure(stats(mass=1.0), stats(mass=0.5))["mass/all"] == 0.75


class TestWatchedKey:
    NORMALISERS = (
        Softmax(),
        Elastic(tau_init=0.5),
        Elastic(renormalise=True),
        Elastic(tau_init=0.01, threshold="constant"),
        Softpick(),
        Differential(),
        SSMax(),
    )

    @pytest.mark.parametrize("normaliser", NORMALISERS, ids=repr)
    @pytest.mark.parametrize("key", [1, 4, LENGTH])
    def test_its_weight_is_that_of_the_matrix(self, normaliser, key):
        """With grouped heads, a bias and a window."""
        draw = torch.Generator().manual_seed(key)
        q, k, v = (torch.randn(BATCH, h, LENGTH, 8, dtype=torch.float64, generator=draw) for h in (4, 2, 2))
        bias = BiasTerms(table=torch.randn(4, 5, dtype=torch.float64, generator=draw))
        rule = normaliser.build(LayerShape(4, 2, 8, 32, LENGTH)).double()
        call = AttentionCall(q, k, v, bias, window=9, renormalise=normaliser.renormalise)
        weights = rule.compute_weights(call).w
        torch.testing.assert_close(rule.compute_key_weight(call, key), weights[..., key - 1], rtol=1e-12, atol=1e-14)

    def test_only_rows_that_see_it_count_and_only_from_the_eighth_on(self):
        position = torch.arange(1, LENGTH + 1.0).expand(BATCH, HEADS, LENGTH)
        for key in (2, 11):
            metrics = AttentionMetrics((), can_zero=False, renormalised=False)
            metrics.update_watched_key([position / LENGTH], key, {"all": ALL})
            rows = range(max(key, FIRST), LENGTH + 1)
            expected = sum(rows) / len(rows) / LENGTH
            assert metrics.compute() == pytest.approx({"sink/fixed_key_weight": expected})

    def test_watching_the_first_key_gives_its_weight(self):
        """On data with row groups."""
        source = Backcopy(
            vocab_size=16, context_length=16, train_sequences=8, validation_sequences=40, fixed_token_at=1
        ).load()
        cfg = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=16, attention=AttentionSpec(Elastic(tau_init=0.4)))
        found = evaluate(DecoderLM(cfg, 17, 16, 0), source, "fp32", 16)
        for group in source.row_groups:
            first, fixed = (found[f"sink/{name}_key_weight_{group}"] for name in ("first", "fixed"))
            assert fixed == pytest.approx(first, rel=1e-5)
            assert fixed > 0
        other = dataclasses.replace(source, watched_key=3)
        elsewhere = evaluate(DecoderLM(cfg, 17, 16, 0), other, "fp32", 16)["sink/fixed_key_weight_trigger"]
        assert elsewhere != pytest.approx(found["sink/fixed_key_weight_trigger"], rel=1e-3)


PARITY = {"even": (N % 2 == 0).expand(BATCH, -1), "odd": (N % 2 == 1).expand(BATCH, -1)}


class TestGroups:
    def test_each_group_has_its_rows(self):
        even = PARITY["even"][0].float()
        measured = measure(stats(mass=0.2 + 0.6 * even, first_weight=0.1 + 0.1 * even), rows=PARITY)
        assert measured == pytest.approx(
            {
                "sink/first_key_weight_even": 0.2,
                "sink/first_key_share_even": 0.2 / 0.8,
                "mass/even": 0.8,
                "sink/first_key_weight_odd": 0.1,
                "sink/first_key_share_odd": 0.1 / 0.2,
                "mass/odd": 0.2,
                "sparsity/zero": 0,
            }
        )

    def test_rows_are_chosen_per_sequence(self):
        rows = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        rows[1, 10:] = True
        layer = stats(mass=1.0)
        layer.mass.data = layer.mass.clone()
        layer.mass[1, :, 10:] = 0.25
        assert measure(layer, rows={"late": rows})["mass/late"] == 0.25

    def test_a_group_without_rows_is_absent(self):
        none = torch.zeros_like(ALL)
        assert measure(stats(), rows={"none": none}, can_zero=False) == {}

    def test_sparsity_is_over_all_rows(self):
        only_first = {"first": (N == 1).expand(BATCH, -1)}
        assert measure(stats(zeros=N * (N > 1)), rows=only_first)["sparsity/zero"] == pytest.approx(
            1 - 1 / (LENGTH**2 + LENGTH) * 2
        )


@torch.no_grad()
def random_stats(cfg, tokens, seed=0):
    model = DecoderLM(cfg, 11, 32, seed).double()
    for attention in model.attentions:
        for parameter in attention.bias.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    inputs = []
    hooks = [a.normaliser.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for a in model.attentions]
    _, layers = model.compute_hidden_with_stats(tokens)
    for hook in hooks:
        hook.remove()
    return model, inputs, layers


def test_batches_do_not_matter():
    cfg = ModelConfig(d_model=12, n_layers=2, n_heads=3, d_ff=12, init_std=0.5, attention=AttentionSpec(Elastic()))
    tokens = torch.randint(11, (6, LENGTH), generator=torch.Generator().manual_seed(0))
    rows = {"rare": tokens < 2, "other": tokens >= 2}
    results = []
    for cuts in ([6], [1, 2, 3], [1] * 6):
        metrics, start = AttentionMetrics(("rare", "other"), can_zero=True, renormalised=False), 0
        for size in cuts:
            part = slice(start, start + size)
            _, _, layers = random_stats(cfg, tokens[part])
            metrics.update(layers, {name: mask[part] for name, mask in rows.items()})
            start += size
        results.append(metrics.compute())
    # Rounding depends on the batch's shape.
    assert results[1] == pytest.approx(results[0], rel=1e-6)
    assert results[2] == pytest.approx(results[0], rel=1e-6)
    assert len(results[0]) == 7


def test_many_small_masses_are_added_in_fp64():
    metrics = AttentionMetrics((), can_zero=False, renormalised=False)
    big, small = stats(mass=2.0**24), stats(mass=2.0**-20)
    metrics.update([big, small], {"all": ALL})
    assert metrics.compute()["mass/all"] == (2.0**24 + 2.0**-20) / 2


def dense(call, tau, renormalise):
    """p, theta and weights `[B, H, L, L]` of per_query, from a layer's q and k."""
    q, k, _, bias, window = call[:5]
    length = q.shape[2]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    visible = (distance >= 0) & (distance < (window or length))
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT / math.sqrt(q.shape[-1])
    if bias.table is not None:
        width = bias.table.shape[1]
        scores = scores + torch.where(distance < width, bias.table[:, distance.clamp(0, width - 1)], 0)
    if bias.slopes is not None:
        scores = scores - bias.slopes[:, None, None] * distance
    p = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    theta = tau / visible.sum(-1).double()[:, None]
    w = torch.relu(p - theta) * visible
    mass = w.sum(-1)
    if renormalise:
        w = w / torch.where(mass > 0, mass, 1)[..., None]
    return p, theta, visible, mass, w


@torch.no_grad()
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("bias", [NoBias(), LearnedBias(length=4), Alibi()], ids=str)
@pytest.mark.parametrize("tau", [0.6, 2.0, -0.5])
def test_agrees_with_dense_weights_of_a_model(tau, bias, window, renormalise):
    spec = AttentionSpec(Elastic(tau_init=tau, renormalise=renormalise), bias, window)
    cfg = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=16, init_std=0.7, attention=spec)
    tokens = torch.randint(11, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    model, inputs, layers = random_stats(cfg, tokens)
    rows = {"rare": tokens < 4, "other": tokens >= 4}
    metrics = AttentionMetrics.of(model.attentions, tuple(rows))
    metrics.update(layers, rows)

    tau_of_model = model.attentions[0].normaliser.tau[0]
    matrices = [dense(call, tau_of_model, renormalise) for call in inputs]
    expected, zeros, seen = {}, 0, 0
    for p, theta, visible, _, _ in matrices:
        zeros += ((p <= theta) & visible).sum().item()
        seen += visible.sum().item() * BATCH * 4
    expected["sparsity/zero"] = zeros / seen
    for group, mask in rows.items():
        late = mask & (torch.arange(1, LENGTH + 1) >= FIRST)
        pick, pick_late = mask[:, None].expand(-1, 4, -1), late[:, None].expand(-1, 4, -1)
        first = sum(w[..., 0][pick_late].sum() for *_, w in matrices)
        total = sum(w.sum(-1)[pick_late].sum() for *_, w in matrices)
        expected[f"mass/{group}"] = (sum(mass[pick].sum() for *_, mass, _ in matrices) / (2 * pick.sum())).item()
        expected[f"sink/first_key_weight_{group}"] = (first / (2 * pick_late.sum())).item()
        expected[f"sink/first_key_share_{group}"] = (first / total).item()
    assert metrics.compute() == pytest.approx(expected, rel=1e-5, abs=1e-7)
    if tau > 0:
        assert 0.1 < expected["sparsity/zero"] < 1
    else:
        assert expected["sparsity/zero"] == 0


@torch.no_grad()
def test_a_softmax_has_all_its_mass():
    cfg = ModelConfig(d_model=16, n_heads=2, d_ff=16, init_std=0.7, attention=AttentionSpec(Softmax(), LearnedBias()))
    tokens = torch.randint(11, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    model, _, layers = random_stats(cfg, tokens)
    metrics = AttentionMetrics.of(model.attentions)
    metrics.update(layers, {"all": ALL})
    measured = metrics.compute()
    assert measured["mass/all"] == pytest.approx(1, rel=1e-6)
    assert measured["sink/first_key_share"] == pytest.approx(measured["sink/first_key_weight"], rel=1e-6)
    assert set(measured) == {"mass/all", "sink/first_key_share", "sink/first_key_weight"}


def test_row_mass_times_itself_is_not_measured_on_renormalised_weights():
    """mass is the surviving mass before renormalising, even if weights are renormalised."""
    cfg = ModelConfig(d_model=16, n_heads=2, d_ff=16, init_std=0.7, attention=AttentionSpec(Elastic(0.8)))
    renormalised = dataclasses.replace(cfg, attention=AttentionSpec(Elastic(0.8, renormalise=True)))
    tokens = torch.randint(11, (BATCH, LENGTH), generator=torch.Generator().manual_seed(3))
    one, other = (random_stats(c, tokens)[2][0] for c in (cfg, renormalised))
    assert torch.equal(one.mass, other.mass)
    assert not torch.allclose(one.first_weight, other.first_weight)
