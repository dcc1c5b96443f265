"""The decoder with each variant of Table 2 and each mixer: causality, decoding, gradients, initial values, sizes."""

import dataclasses
import itertools

import pytest
import torch

from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    Elastic,
    Fire,
    GatedDeltaNet,
    KerpleLog,
    LearnedAbsolute,
    LearnedBias,
    Mamba2,
    NoPosition,
    RetNet,
    Softmax,
    T5Bias,
)
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import load_module
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.model.decoder import DecoderLM, flops_per_token
from lit_lazy.support.names_to_paths import find

VOCAB, CONTEXT, LENGTH = 11, 16, 13
LONG = 70
"""Longer than a chunk of the plain recurrences of other mixers, so that a state is passed on."""
# A large init_std makes attention weights far from uniform.
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=24, init_std=0.4)
TABLE2 = load_module(find("ablations", "table2")).ablation.all_rows
VARIANTS = {row.name: replace_at(RunConfig(Backcopy(), SMALL), row.changes).model for row in TABLE2} | {
    name: dataclasses.replace(SMALL, **changes)
    for name, changes in {
        "window": {"attention": AttentionSpec(Elastic(), LearnedBias(length=3), window=4)},
        "softmax, window": {"attention": AttentionSpec(window=4)},
        "GQA": {"n_heads": 4, "n_kv_heads": 2, "attention": AttentionSpec(Elastic(), LearnedBias())},
        "softmax, GQA": {"n_heads": 4, "n_kv_heads": 1},
        "learned positions": {"position": LearnedAbsolute(), "attention": AttentionSpec(Elastic(), LearnedBias())},
        "softmax, no positions": {"position": NoPosition()},
        "untied": {"tie_embeddings": False},
        "normed queries": {"attention": AttentionSpec(Elastic(), LearnedBias(), qk_norm=True)},
        "constant, renormalised, window": {
            "attention": AttentionSpec(Elastic(0.05, "constant", renormalise=True), window=5)
        },
    }.items()
}
ELASTIC = {name: cfg for name, cfg in VARIANTS.items() if isinstance(cfg.attention.normaliser, Elastic)}
PLAIN = {"position": NoPosition()}
MIXERS = {
    name: dataclasses.replace(SMALL, **changes)
    for name, changes in {
        "RetNet": {"mixer": RetNet()},
        "RetNet, no positions": {"mixer": RetNet(), **PLAIN},
        "Mamba2": {"mixer": Mamba2(head_dim=8), **PLAIN},
        "GatedDeltaNet": {"mixer": GatedDeltaNet(), **PLAIN},
        "GatedDeltaNet, odd width": {"d_model": 15, "n_heads": 3, "mixer": GatedDeltaNet(), **PLAIN},
    }.items()
}
EVERY = VARIANTS | MIXERS
every_model = pytest.mark.parametrize("cfg", EVERY.values(), ids=EVERY)


def build(cfg, seed=0):
    """A model with non-zero biases, as after training."""
    model = DecoderLM(cfg, VOCAB, CONTEXT, seed)
    for layer, attention in enumerate(model.attentions):
        for parameter in attention.bias.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(layer))
            parameter.data.add_(0.3 * noise)
    return model


def tokens(batch=2, length=LENGTH, seed=0):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize(
    ("cfg", "sign"),
    [*((cfg, 1) for cfg in EVERY.values()), *((cfg, -1) for cfg in ELASTIC.values())],
    ids=[*EVERY, *(f"{name}, tau < 0" for name in ELASTIC)],
)
def test_no_row_sees_the_future(cfg, sign):
    """Logits before a changed token are bit-identical; later ones change."""
    model = build(cfg)
    for name, tau in model.named_parameters():
        if name.endswith("normaliser.tau"):
            tau.fill_(sign * (tau.abs().max() or 0.5))
    x = tokens(length=LENGTH if cfg.mixer.attends else LONG)
    length, before = x.shape[1], model(x)
    for t in (t for t in {0, 1, 6, 63, 64, length - 1} if t < length):
        changed = x.clone()
        changed[:, t] = (x[:, t] + 1) % VOCAB
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(-1).all()
        if 0 < t < length - 1:
            assert (after[:, t + 1] != before[:, t + 1]).any(-1).all()


@torch.no_grad()
@every_model
def test_decoding_equals_the_full_forward(cfg):
    """Weights and activations in float64; the recurrence of a mixer rounds to float32."""
    model, x = build(cfg).double(), tokens(length=LENGTH if cfg.mixer.attends else LONG)
    steps = [5, 1, 1, 3, 3] if cfg.mixer.attends else [5, 1, 1, 60, 3]
    cache, parts, start = model.new_cache(), [], 0
    for step in steps:
        parts.append(model(x[:, start : start + step], cache))
        start += step
        assert {layer.length for layer in cache} == {start}
    full = model(x)
    close = (1e-10, 1e-11) if cfg.mixer.attends else (1e-4, 1e-5 * full.abs().max().item())
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=close[0], atol=close[1])


@every_model
def test_gradients_are_finite_and_reach_every_parameter(cfg):
    model, x = build(cfg), tokens(length=LENGTH if cfg.mixer.attends else LONG)
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten()).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.count_nonzero() > 0, name


class TestStart:
    def test_variants_of_one_seed_share_their_common_parameters(self):
        states = {name: dict(DecoderLM(cfg, VOCAB, CONTEXT, 3).named_parameters()) for name, cfg in EVERY.items()}
        shared = 0
        for one, other in itertools.combinations(states.values(), 2):
            for name in one.keys() & other.keys():
                # tau starts at a constant.
                if one[name].shape == other[name].shape and not name.endswith("tau"):
                    assert torch.equal(one[name], other[name]), name
                    shared += 1
        assert shared > len(states) * 10

    @every_model
    def test_seeds_differ_in_every_drawn_parameter(self, cfg):
        """And so do the parameters of one model, all in fp32; torch's own generator has no effect."""
        one, again, other = (DecoderLM(cfg, VOCAB, CONTEXT, seed) for seed in (0, 0, 1))
        assert all(map(torch.equal, one.state_dict().values(), again.state_dict().values()))
        constant = ("norm.weight", "norm.bias", "skip", "tau", "bias.table", "bias.values", "bias.c")
        drawn = set()
        for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
            assert a.dtype == torch.float32
            assert torch.equal(a, b) is name.endswith(constant), name
            if not name.endswith(constant):
                assert tuple(a.flatten()[:5].tolist()) not in drawn, name
                drawn.add(tuple(a.flatten()[:5].tolist()))

    def test_matrices_have_the_given_spread(self):
        model = DecoderLM(dataclasses.replace(SMALL, d_model=64, d_ff=64, init_std=0.02), 512, CONTEXT, 0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                assert torch.equal(parameter, torch.ones_like(parameter))
            else:
                n = parameter.numel()
                assert parameter.std().item() == pytest.approx(0.02, rel=5 / (2 * n) ** 0.5), name
                assert parameter.mean().item() == pytest.approx(0, abs=5 * 0.02 / n**0.5), name


class TestSize:
    """d = 8, 2 blocks, 2 heads of 4 on 1 kv head, d_ff = 16, vocabulary 11, context 6, counted by hand."""

    CFG = ModelConfig(d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=16)
    BLOCK = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16
    NORMS = 2 * 2 * 8 + 8

    @pytest.mark.parametrize(
        ("changes", "extra"),
        [
            ({}, 0),
            ({"tie_embeddings": False}, 11 * 8),
            ({"attention": AttentionSpec(Elastic())}, 2 * 2),
            ({"attention": AttentionSpec(Elastic(threshold="per_token"))}, 2 * 2 * 6),
            ({"attention": AttentionSpec(Softmax(), LearnedBias())}, 2 * 2 * 6),
            ({"attention": AttentionSpec(Softmax(), LearnedBias(length=5))}, 2 * 2 * 5),
            ({"attention": AttentionSpec(Softmax(), Alibi())}, 0),
            ({"attention": AttentionSpec(Softmax(), T5Bias())}, 2 * 2 * 32),
            ({"attention": AttentionSpec(Softmax(), KerpleLog())}, 2 * 2 * 2),
            ({"attention": AttentionSpec(Softmax(), Fire(width=5))}, 2 * (1 + 2 * 5 + 5 * 2 + 2)),
            ({"position": LearnedAbsolute()}, 6 * 8),
            ({"position": NoPosition()}, 0),
        ],
        ids=str,
    )
    def test_parameters(self, changes, extra):
        model = DecoderLM(dataclasses.replace(self.CFG, **changes), 11, 6, 0)
        assert sum(p.numel() for p in model.parameters()) == 11 * 8 + 2 * self.BLOCK + self.NORMS + extra

    @pytest.mark.parametrize("tie", [True, False])
    def test_flops(self, tie):
        """FLOPs count the head once, tied or not; the embedding is a lookup."""
        model = DecoderLM(dataclasses.replace(self.CFG, tie_embeddings=tie), 11, 6, 0)
        assert (model.head.weight is model.embedding.weight) == tie
        assert flops_per_token(model, 6) == 6 * (2 * self.BLOCK + 11 * 8) + 6 * 2 * 6 * 8 == 8016
