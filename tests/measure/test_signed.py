"""Measurements of other normalisers than Lazy Attention's depend on their declarations, never on their class."""

import dataclasses

import pytest
import torch

from lit_lazy.attention import (
    AttentionSpec,
    ClippedSoftmax,
    Differential,
    LearnedBias,
    Normaliser,
    OffByOne,
    Relu,
    Softmax,
    Softpick,
)
from lit_lazy.config import ModelConfig
from lit_lazy.measure.arrays import Diagnostics
from lit_lazy.measure.attention_metrics import AttentionMetrics
from lit_lazy.measure.diagnostics import measure
from lit_lazy.model.decoder import DecoderLM

LENGTH = 12
CFG = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=16, init_std=0.5)
TOKENS = torch.randint(16, (3, LENGTH), generator=torch.Generator().manual_seed(0))
BATCH = {"tokens": TOKENS, "targets": TOKENS}


def model(normaliser: Normaliser) -> DecoderLM:
    attention = AttentionSpec(normaliser, LearnedBias(init_std=0.5))
    return DecoderLM(dataclasses.replace(CFG, attention=attention), 16, LENGTH, seed=1)


def measured(normaliser: Normaliser) -> tuple[dict[str, float], Diagnostics]:
    """Ratios on the validation set, and diagnostics."""
    made = model(normaliser)
    metrics = AttentionMetrics.of(made.attentions)
    with torch.no_grad():
        metrics.update(made.compute_hidden_with_stats(TOKENS)[1], {"all": torch.ones_like(TOKENS, dtype=torch.bool)})
    return metrics.compute(), measure(made, [BATCH])


def test_signed_weights_have_no_shares_entropy_or_sparsity():
    ratios, diagnostics = measured(Differential())
    arrays = diagnostics.arrays
    assert set(ratios) == {"sink/first_key_weight", "mass/all"}
    for name in ("sink/share", "sink/rate_share", "entropy/keys", "sparsity/zero", "sparsity/small", "sparsity/null"):
        assert torch.from_numpy(arrays[name]).isnan().all(), name
    for name in ("sink/weight", "sink/rate", "mass/row", "scores/spread", "loss/by_position"):
        assert torch.from_numpy(arrays[name]).isfinite().all(), name
    assert not [name for name in diagnostics.scalars() if name.startswith(("entropy", "sparsity"))]
    assert (arrays["maps/weights"] < 0).any()


@pytest.mark.parametrize("normaliser", [Softpick(), Relu(), ClippedSoftmax()], ids=repr)
def test_a_rule_that_cuts_has_a_sparsity_and_no_null_model(normaliser):
    ratios, diagnostics = measured(normaliser)
    made, found = model(normaliser), []
    for layer in made.attentions:
        layer.normaliser.register_forward_pre_hook(lambda rule, args: found.append(rule.compute_weights(args[0])))
    with torch.no_grad():
        made(TOKENS)
    zeros = sum(((x.w == 0) & x.rows.visible).sum().item() for x in found)
    share = zeros / sum(x.rows.visible.expand_as(x.w).sum().item() for x in found)
    assert 0.1 < ratios["sparsity/zero"] < 0.95
    assert ratios["sparsity/zero"] == pytest.approx(share)
    assert diagnostics.arrays["sparsity/zero"].mean() == pytest.approx(share, abs=1e-6)
    assert torch.from_numpy(diagnostics.arrays["sparsity/null"]).isnan().all()


@pytest.mark.parametrize("normaliser", [Softmax(), OffByOne()], ids=repr)
def test_a_rule_that_never_cuts_has_no_sparsity(normaliser):
    ratios, diagnostics = measured(normaliser)
    assert "sparsity/zero" not in ratios
    assert "sink/first_key_share" in ratios
    assert torch.from_numpy(diagnostics.arrays["sparsity/zero"]).isnan().all()
