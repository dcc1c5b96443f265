"""The compiled training step and forward pass: equal to the model's own in fp64, and left alone where it is unknown."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flash_lazy.cpu import library
from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    Elastic,
    LearnedAbsolute,
    LearnedBias,
    NoBias,
    NoPosition,
    OffByOne,
    OutputGate,
    Rope,
    Softmax,
)
from lit_lazy.attention.normaliser import LazyThreshold, NormaliserModule, SoftmaxModule, _Elastic
from lit_lazy.attention.position import DynamicScaling, LinearScaling
from lit_lazy.config import ModelConfig
from lit_lazy.data import IGNORED
from lit_lazy.model import cpu_decoder
from lit_lazy.model.decoder import DecoderLM, SwiGLU
from lit_lazy.model.loss import head_nll, mean_nll

pytestmark = pytest.mark.skipif(
    library.find_obstacle() is not None, reason="the compiled backend is not installed (it needs a C++ compiler)"
)

WORDS, BATCH, LENGTH = 37, 3, 50
BASE = ModelConfig(d_model=32, n_layers=2, n_heads=4, d_ff=48, init_std=0.3, tie_embeddings=False)
LAZY = AttentionSpec(Elastic(), LearnedBias(init_std=0.3))
MODELS = {
    "softmax": (BASE, AttentionSpec(Softmax(), NoBias())),
    "elastic": (BASE, LAZY),
    "elastic with grouped keys": (replace(BASE, n_kv_heads=2), LAZY),
    "renormalised": (BASE, AttentionSpec(Elastic(renormalise=True), LearnedBias(length=7, init_std=0.3))),
    "per token, slopes, window": (BASE, AttentionSpec(Elastic(threshold="per_token"), Alibi(), window=9)),
    "a window in one layer": (BASE, AttentionSpec(Elastic(), window=9, full_layers=(1,))),
    "a base that grows with the text": (replace(BASE, position=Rope(scaling=DynamicScaling(4.0, 20))), LAZY),
    "training context": (BASE, AttentionSpec(Elastic(threshold="seq_len"), LearnedBias(init_std=0.3))),
    "constant": (BASE, AttentionSpec(Elastic(threshold="constant", tau_init=0.02), NoBias())),
    "no position": (replace(BASE, position=NoPosition()), LAZY),
    "learned positions": (replace(BASE, position=LearnedAbsolute()), LAZY),
    "tied head": (replace(BASE, tie_embeddings=True), LAZY),
    "one wide head": (replace(BASE, d_model=48, n_heads=1, d_ff=16, n_layers=1), LAZY),
    "wide heads, slow rotation, another epsilon": (
        replace(BASE, head_dim=32, norm_eps=0.01, position=Rope(scaling=LinearScaling(3.0))),
        LAZY,
    ),
    "long": (replace(BASE, n_layers=1), LAZY),
}


def make_model(name):
    cfg, spec = MODELS[name]
    return DecoderLM(replace(cfg, attention=spec), WORDS, get_length(name), seed=3)


def get_length(name):
    return 300 if name == "long" else LENGTH


def draw(length=LENGTH, batch=BATCH):
    """Tokens, and targets of which some are ignored."""
    generator = torch.Generator().manual_seed(5)
    tokens, targets = (torch.randint(WORDS, (batch, length), generator=generator) for _ in range(2))
    return tokens, targets.masked_fill(torch.rand(batch, length, generator=generator) < 0.2, IGNORED)


def compute_gradients(model, loss):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()))
    return {"loss": loss.detach(), **dict(zip(named, found, strict=True))}


def run_own_path(model, tokens, targets):
    nll = head_nll(model.compute_hidden(tokens), model.head.weight, targets)
    return compute_gradients(model, mean_nll(nll.to(model.head.weight.dtype), targets))


def run_in_double(model, tokens, targets):
    """The loss by log-softmax: `head_nll` is fp32."""
    model = copy.deepcopy(model).double()
    logits = model(tokens).flatten(0, 1)
    return compute_gradients(model, nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED))


def measure_errors(found, exact):
    return {name: float((x.double() - exact[name]).abs().max() / exact[name].abs().max()) for name, x in found.items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_step_errs_no_more_than_the_models_own(name):
    """At most twice the model's own largest relative error in float32 over the loss and all gradients."""
    model, (tokens, targets) = make_model(name), draw(get_length(name))
    assert cpu_decoder.describe(model, tokens) is not None
    exact = run_in_double(model, tokens, targets)
    own = max(measure_errors(run_own_path(model, tokens, targets), exact).values())
    mine = measure_errors(compute_gradients(model, cpu_decoder.compute_mean_loss(model, tokens, targets)), exact)
    assert {name: error for name, error in mine.items() if not error <= 2 * own} == {}


@pytest.mark.parametrize("name", MODELS)
def test_the_forward_pass_equals_the_models_own(name):
    model, (tokens, _) = make_model(name), draw(get_length(name))
    with torch.no_grad():
        assert cpu_decoder.describe(model, tokens) is not None
        hidden, stats = cpu_decoder.compute_hidden(model, tokens, with_stats=True)
        expected, expected_stats = model.compute_residual(tokens, with_stats=True)
        torch.testing.assert_close(hidden, model.norm(expected), rtol=1e-4, atol=1e-5)
        for mine, own in zip(stats, expected_stats, strict=True):
            for field, (x, y) in zip(mine._fields, zip(mine, own, strict=True), strict=True):
                # A score on the threshold may fall on either side.
                different = (x - y).abs() > 1e-4
                assert different.double().mean() < (2e-3 if field == "zeros" else 1e-9), field
        assert cpu_decoder.compute_hidden(model, tokens)[1] == []


def test_the_step_is_deterministic_and_threads_only_round():
    model, (tokens, targets) = make_model("elastic"), draw(batch=8)
    once, again = (compute_gradients(model, cpu_decoder.compute_mean_loss(model, tokens, targets)) for _ in range(2))
    assert all(map(torch.equal, once.values(), again.values()))
    torch.set_num_threads(2)
    other, repeated = (compute_gradients(model, cpu_decoder.compute_mean_loss(model, tokens, targets)) for _ in "12")
    assert all(map(torch.equal, other.values(), repeated.values()))
    for name, x in once.items():
        torch.testing.assert_close(x, other[name], rtol=1e-4, atol=1e-6, msg=name)


def test_the_gradient_of_a_scaled_loss_is_scaled_once():
    """Accumulated micro-batches divide the loss."""
    model, (tokens, targets) = make_model("elastic"), draw()
    whole, half = (
        compute_gradients(model, f * cpu_decoder.compute_mean_loss(model, tokens, targets)) for f in (1, 0.5)
    )
    for name in whole:
        torch.testing.assert_close(half[name], whole[name] / 2, msg=name)
    loss = cpu_decoder.compute_mean_loss(model, tokens, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already used"):
        loss.backward()


def test_frozen_parameters_get_no_gradient():
    model, (tokens, targets) = make_model("elastic"), draw()
    frozen = {"blocks.0.mlp.up.weight", "blocks.1.attention.normaliser.tau"}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    cpu_decoder.compute_mean_loss(model, tokens, targets).backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == frozen


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_targets_beyond_the_vocabulary_are_refused_and_any_whole_numbers_are_read(value):
    """None at all gives NaN, as the mean of nothing does; a broken weight breaks the loss."""
    model, (tokens, targets) = make_model("softmax"), draw()
    expected = cpu_decoder.compute_mean_loss(model, tokens, targets)
    assert torch.equal(cpu_decoder.compute_mean_loss(model, tokens, targets.to(torch.int32)), expected)
    with pytest.raises(ValueError, match=r"targets has shape \[2, 50\]; give \[3, 50\]"):
        cpu_decoder.compute_mean_loss(model, tokens, targets[:2])
    with pytest.raises(IndexError, match="targets has 37; the vocabulary has 37 words"):
        cpu_decoder.compute_mean_loss(model, tokens, targets.masked_fill(targets == 3, WORDS))
    assert cpu_decoder.compute_mean_loss(model, tokens, torch.full_like(targets, IGNORED)).isnan()
    model.blocks[1].mlp.down.weight.data[0, 0] = value
    assert not cpu_decoder.compute_mean_loss(model, tokens, targets).isfinite()


@dataclass(frozen=True)
class Given(Softmax):
    """A rule of a user, by its module."""

    module: NormaliserModule | None = None

    def build(self, shape):  # noqa: ARG002
        return self.module


class Halved(_Elastic):
    """Inherits the threshold of another rule."""

    def weights(self, scores, rows):
        return super().weights(scores, rows) / 2


class Cosine(SoftmaxModule):
    """Declares softmax's threshold for scaled queries and keys."""

    unit_length = True

    def lazy_threshold(self):
        return LazyThreshold()


UNKNOWN = {
    "another normaliser": (BASE, AttentionSpec(OffByOne())),
    "a rule of a user": (BASE, AttentionSpec(Given(module=Halved(Elastic(), 4, LENGTH)))),
    "a gate": (BASE, replace(LAZY, gate=OutputGate())),
    "normalised queries": (BASE, replace(LAZY, qk_norm=True)),
    "queries of length 1": (BASE, AttentionSpec(Given(module=Cosine()))),
    "another backend": (replace(BASE, backend="chunked"), LAZY),
    "a width that is no multiple of a vector": (replace(BASE, d_ff=40), LAZY),
    "a large block": (replace(BASE, d_model=512, d_ff=2048), LAZY),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_models_run_their_own_path(name):
    cfg, spec = UNKNOWN[name]
    model, (tokens, targets) = DecoderLM(replace(cfg, attention=spec), WORDS, LENGTH, seed=3), draw()
    assert cpu_decoder.describe(model, tokens) is None
    expected = run_own_path(model, tokens, targets)
    found = compute_gradients(model, cpu_decoder.compute_mean_loss(model, tokens, targets))
    assert all(map(torch.equal, found.values(), expected.values()))


CHANGES = {
    "hook": lambda model: model.blocks[0].register_forward_hook(lambda *_: None),
    "parametrize": lambda model: nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.up),
    "another norm": lambda model: setattr(model.blocks[0], "mlp_norm", nn.LayerNorm(model.cfg.d_model)),
    "checkpoint": lambda model: setattr(model, "checkpoint_activations", True),
    "double": DecoderLM.double,
    "a bias": lambda model: setattr(model.blocks[1].attention, "v", nn.Linear(32, 32)),
    "another eps": lambda model: setattr(model.blocks[0].mlp_norm, "eps", 1.0),
    "no gain": lambda model: setattr(model, "norm", nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)),
    "a narrow layer": lambda model: setattr(model.blocks[1], "mlp", SwiGLU(32, 16)),
    "a rounded embedding": lambda model: model.embedding.bfloat16(),
    "a method": lambda model: setattr(model.attentions[0].normaliser, "output", lambda out: 2 * out),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models_run_their_own_path(name):
    model = make_model("elastic")
    assert cpu_decoder.describe(model, torch.zeros(BATCH, LENGTH)) is not None
    CHANGES[name](model)
    assert cpu_decoder.describe(model, torch.zeros(BATCH, LENGTH)) is None


def test_other_ways_to_run_take_the_models_own_path(monkeypatch):
    model, (tokens, _), x = make_model("elastic"), draw(), torch.zeros(BATCH, LENGTH)
    monkeypatch.setattr(cpu_decoder, "decoder_residual", None)
    cpu_decoder.compute_residual(model, tokens)  # gradients are enabled
    with torch.no_grad():
        cpu_decoder.compute_residual(model, tokens, torch.arange(LENGTH).expand(BATCH, -1))
        with pytest.raises(TypeError, match="not callable"):
            cpu_decoder.compute_residual(model, tokens)
    for context in (torch.autocast("cpu", torch.bfloat16), FlopCounterMode(display=False)):
        with context:
            assert cpu_decoder.describe(model, x) is None
    for few in (torch.zeros(torch.get_num_threads() - 1, LENGTH), torch.zeros(BATCH, 0)):
        assert cpu_decoder.describe(model, few) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert cpu_decoder.describe(model, x) is None
    handle.remove()
    assert cpu_decoder.describe(model, x) is not None
    monkeypatch.setenv(library.SWITCH, "0")
    assert cpu_decoder.describe(model, x) is None
