"""`LazyAttention` as a layer of a user's model: formula, precision, decoding, padding, initialisation."""

import copy
import pickle
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import flash_lazy
from flash_lazy import KeyValueCache, LazyAttention, attention_weights, lazy_attention

WAYS = {
    "plain": {"rope_base": None, "reach": 0},
    "grouped": {"kv_heads": 2, "reach": 5},
    "per token": {"threshold": "per_token", "context_length": 12, "renormalise": True},
    "seq_len": {"threshold": "seq_len", "context_length": 12, "window": 7, "head_dim": 6},
}


def make(**settings):
    torch.manual_seed(0)
    layer = LazyAttention(32, 4, **settings)
    with torch.no_grad():
        for parameter in (layer.tau, layer.bias):
            if parameter is not None:
                parameter.copy_(0.5 + 0.1 * torch.randn_like(parameter))
    return layer


def tokens(count=10):
    return torch.randn(2, count, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
def test_the_layer_is_its_formula(way):
    """Against explicit rotations by complex numbers and the eager weight matrix, in float64."""
    layer, x = make(**WAYS[way]).double(), tokens().double()
    half = layer.head_dim // 2
    angle = torch.arange(10)[:, None] * (layer.rope_base or 1) ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angle), angle if layer.rope_base else 0 * angle).to(torch.complex128)

    def split(y):
        return y.unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)

    def turned(y):
        pairs = torch.complex(y[..., :half], y[..., half:]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    q, k, v = turned(split(layer.q_proj(x))), turned(split(layer.k_proj(x))), split(layer.v_proj(x))
    settings = {name: value for name, value in layer.settings.items() if name != "backend"}
    w = attention_weights(q, k, layer.tau.double(), None if layer.bias is None else layer.bias.double(), **settings).w
    out = (w @ v.repeat_interleave(4 // layer.kv_heads, dim=1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), layer.o_proj(out), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_decoding_with_a_cache_equals_the_full_pass(way):
    layer, x, cache = make(**WAYS[way]), tokens(), KeyValueCache()
    parts = [layer(part, cache) for part in x.split([4, 1, 3, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=1e-5, atol=1e-6)
    assert cache.length == 10


@torch.no_grad()  # torch copies no tensor with a history
def test_a_cache_serves_one_layer_and_may_be_copied():
    layer, other, x, cache = make(), make(), tokens(), KeyValueCache()
    layer(x[:, :9], cache)
    with pytest.raises(ValueError, match="cache is another layer's; give each layer its own"):
        other(x[:, 9:], cache)
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert copied.length == cache.length == 9
        torch.testing.assert_close(other(x[:, 9:], copied), layer(x)[:, 9:])
    moved, kept = copy.deepcopy((layer, cache))
    torch.testing.assert_close(moved(x[:, 9:], kept), layer(x[:, 9:], cache))


@torch.no_grad()
def test_a_cache_keeps_only_the_window_and_takes_nothing_of_a_refused_call():
    layer, x, cache = make(window=4), tokens(), KeyValueCache()
    for token in x[:, :-1].split(1, dim=1):
        layer(token, cache)
        cache.dropped += cache.keys[:, :, :-3].shape[2]
        cache.keys, cache.values = cache.keys[:, :, -3:], cache.values[:, :, -3:]
    with pytest.raises(ValueError, match="key_mask is"):
        layer(x[:, -1:], cache, key_mask=torch.ones(2, 1, dtype=torch.bool))
    assert cache.length == 9
    torch.testing.assert_close(layer(x[:, -1:], copy.deepcopy(cache)), layer(x)[:, -1:])
    with pytest.raises(ValueError, match="cache has dropped 6 tokens; threshold 'per_token' needs all of them"):
        make(threshold="per_token", context_length=9)(x[:, -1:], copy.deepcopy(cache))


@pytest.mark.parametrize("settings", [{"reach": 5}, {"threshold": "per_token", "context_length": 9}])
@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
def test_a_left_padded_sequence_equals_itself_without_padding(settings, backend):
    layer, x = make(backend=backend, **settings), tokens()
    nn.init.uniform_(layer.tau, -2, 2)
    mask = torch.arange(10).expand(2, 10) >= torch.tensor([[0], [3]])
    torch.testing.assert_close(layer(x, key_mask=mask)[1, 3:], layer(x[1:, 3:])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half().bfloat16()])
def test_tau_and_bias_keep_their_precision(cast):
    layer = make(reach=5)
    before = layer.tau.detach().clone(), layer.bias.detach().clone()
    model = cast(nn.Sequential(layer))
    assert layer.q_proj.weight.dtype == torch.bfloat16
    assert torch.equal(layer.tau, before[0])
    assert torch.equal(layer.bias, before[1])
    out = model(tokens().bfloat16())
    out.sum().backward()
    assert (out.dtype, layer.tau.grad.dtype) == (torch.bfloat16, torch.float32)
    assert layer.double().tau.dtype == torch.float64
    assert layer.bfloat16().tau.dtype == torch.float32


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_state_of_half_precision_is_loaded_into_float32(pickled, assign):
    layer, other = make(reach=5), make(reach=5)
    other = pickle.loads(pickle.dumps(layer)) if pickled else other
    assert torch.equal(other(tokens()), layer(tokens()))
    state = {name: value.bfloat16() for name, value in nn.Sequential(layer).state_dict().items()}
    nn.Sequential(other).load_state_dict(state, assign=assign)
    assert other.tau.dtype == other.bias.dtype == torch.float32
    assert torch.equal(other.tau, layer.tau.bfloat16().float())
    other.bfloat16().load_state_dict(layer.bfloat16().state_dict())
    assert torch.equal(other.tau, layer.tau)


def test_a_layer_from_meta_initialises_itself():
    with torch.device("meta"):
        layer = LazyAttention(32, 4, tau=0.7)
    assert layer(tokens().to("meta")).shape == (2, 10, 32)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    assert (layer.tau == 0.7).all()
    assert (layer.bias == 0).all()
    assert 0.05 < layer.q_proj.weight.std() < 0.2


def test_the_names_without_weight_decay_are_its_own_and_outlive_a_copy():
    model = copy.deepcopy(nn.ModuleDict({"a": make(), "b": make(reach=0)}))
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, LazyAttention)]
    marked = {f"{path}.{name}" for path, m in layers for name in m.no_weight_decay()}
    assert marked == {"a.tau", "a.bias", "b.tau"}
    assert marked <= dict(model.named_parameters()).keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_heads": 0}, "kv_heads is 0; give a whole number, at least 1"),
        ({"heads": 5}, "heads is 5; give a divisor of width, 32, or head_dim"),
        ({"kv_heads": 3}, "kv_heads is 3; give a divisor of heads, 4"),
        ({"reach": -1}, "reach is -1; give a whole number, 0 for no bias"),
        ({"tau": "1"}, "tau is '1'; give a number"),
        ({"head_dim": 7}, "rope_base is 10000.0 and head_dim 7; give an even head_dim, or None"),
        ({"threshold": "seq_len"}, "threshold is 'seq_len' and context_length None; seq_len and per_token need one"),
        (
            {"context_length": 8},
            "threshold is 'per_query' and context_length 8; seq_len and per_token need one, no other",
        ),
        ({"x": torch.zeros(10, 32)}, r"x is \[10, 32\]; give \[batch, tokens, 32\]"),
        ({"x": torch.zeros(2, 10, 16)}, r"x is \[2, 10, 16\]; give \[batch, tokens, 32\]"),
        ({"x": torch.zeros(3, 1, 32)}, "cache has a batch of 2 and x of 3; give each batch its own cache"),
        ({"cache": {}}, "cache is dict; give a flash_lazy.KeyValueCache"),
        ({"threshold": "constant"}, "tau is 1.0 and threshold 'constant'; give less than 1, which no weight exceeds"),
    ],
)
def test_an_invalid_argument_is_named(settings, message):
    settings, cache = dict(settings), KeyValueCache()
    x, given = settings.pop("x", tokens()), settings.pop("cache", cache)

    def use():
        layer = LazyAttention(**({"width": 32, "heads": 4} | settings))
        layer(tokens(), cache)
        layer(x, given)

    with pytest.raises(ValueError, match=message):
        use()


@pytest.mark.parametrize("backend", ["auto", "chunked", "reference"])
@pytest.mark.parametrize("enabled", [True, False], ids=["", "no_grad"])
@pytest.mark.parametrize(
    "trace",
    [
        partial(torch.jit.trace, check_trace=False),
        lambda f, x: make_fx(f)(x),
        lambda f, x: torch.export.export(f, (x,)).module(),
    ],
    ids=["jit", "make_fx", "export"],
)
def test_a_traced_layer_computes_what_the_layer_does(trace, enabled, backend):
    """Also its gradients, if it was traced without them too, and for inputs of which other tiles can be skipped."""
    layer, x = make(backend=backend).eval(), tokens(300)
    with torch.set_grad_enabled(enabled):
        traced = trace(layer, x)
    y = (9 * x).requires_grad_()
    (dy, out), (expected_dy, expected) = (
        (*torch.autograd.grad(z.square().sum(), y, retain_graph=True), z) for z in (traced(y), layer(y))
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(dy, expected_dy)


@pytest.mark.parametrize("backend", ["auto", "chunked"])
@pytest.mark.parametrize("fake", ["q", "k"])
def test_a_call_with_any_fake_tensor_gives_one(fake, backend):
    """It has no memory to read, and without its mode only its class shows it."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    given = {name: torch.randn(1, 4, 5, 8) for name in "qkv"}
    given[fake] = mode.from_tensor(given[fake])
    assert isinstance(lazy_attention(*given.values(), torch.ones(4), backend=backend), FakeTensor)


@torch.no_grad()
def test_projections_may_be_replaced_by_any_module():
    """As quantisers do, whose modules keep neither a weight with a dtype nor the names of Linear's sizes."""
    layer, x = make().eval(), tokens()
    expected = layer(x)
    quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8)
    assert 0 < (quantised(x) - expected).abs().max() < 0.05 * expected.abs().max()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        packed = nn.Module()
        packed.forward = partial(nn.functional.linear, weight=getattr(layer, name).weight)
        setattr(layer, name, packed)
    assert torch.equal(layer(x), expected)


def test_the_example_learns_and_decodes_as_without_a_cache():
    file = Path(flash_lazy.__path__[0]).parent / "examples" / "own_model.py"
    example = SimpleNamespace(**runpy.run_path(str(file)))
    torch.manual_seed(0)
    model, pattern = example.PatternModel(words=10), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]).repeat(3)[None]
    losses = example.train(model, pattern, steps=40)
    assert losses[-1] < 0.1 < losses[0]
    assert any(group["weight_decay"] == 0 for group in example.make_optimiser(model).param_groups)
    ids = pattern[:, :11]
    for token in model.generate(ids, count=6):
        assert token == model(ids)[:, -1].argmax().item()
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
