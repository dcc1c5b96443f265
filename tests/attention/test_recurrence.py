"""The recurrences against plain loops in float64, and each layer without attention against its paper's formula."""

import inspect
import math

import pytest
import torch
from torch.nn import functional as F

from lit_lazy.attention import GatedDeltaNet, LayerShape, Mamba2, PassInputs, RetNet, Rope
from lit_lazy.attention.mixer import SelfInitialised
from lit_lazy.attention.recurrence import RecurrentCache, _kernels, decayed_sum, gated_delta

BATCH, LENGTH, HEADS, KEYS, VALUES = 2, 70, 3, 6, 10
"""More tokens than a chunk of the plain functions."""
SHAPE = LayerShape(n_heads=2, n_kv_heads=2, head_dim=8, d_model=16, context_length=32)
MIXERS = (RetNet(), Mamba2(), Mamba2(state=5, head_dim=8, kernel=3), GatedDeltaNet())
every_mixer = pytest.mark.parametrize("mixer", MIXERS, ids=repr)


def inputs(recurrence):
    """Of every argument of a recurrence."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(BATCH, LENGTH, HEADS, *shape, generator=generator)

    found = {"q": draw(KEYS), "k": F.normalize(draw(KEYS), dim=-1), "v": draw(VALUES), "g": -0.3 * draw().abs()}
    return found | ({"beta": draw().sigmoid()} if recurrence is gated_delta else {})


def loop(q, k, v, g, beta=None, state=None):
    """Token by token: the state decays; then `k v^T` is added, or with beta v replaces the value under k."""
    state = q.new_zeros(BATCH, HEADS, KEYS, VALUES) if state is None else state
    rows = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        new = (
            v[:, t] if beta is None else beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        )
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1), state


@pytest.mark.parametrize("recurrence", [decayed_sum, gated_delta])
def test_a_recurrence_is_its_loop(recurrence):
    """Outputs, gradients and a passed-on state match a float64 loop within a few float32 roundings."""
    given = inputs(recurrence)
    for x in given.values():
        x.requires_grad_()
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    cache = RecurrentCache()
    parts = [
        recurrence(**{name: x[:, part] for name, x in given.items()}, cache=cache)
        for part in (slice(0, 66), slice(66, 67), slice(67, LENGTH))
    ]
    out, (wanted, state) = torch.cat(parts, 1), loop(**exact)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.state.double(), state, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad(out.square().sum(), list(given.values()))
    expected = torch.autograd.grad(wanted.square().sum(), list(exact.values()))
    for name, a, b in zip(given, found, expected, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm(), name


@pytest.mark.parametrize("recurrence", [decayed_sum, gated_delta])
def test_mixed_precision_does_not_round_a_state(recurrence):
    given = inputs(recurrence)
    wanted = recurrence(**given, cache=RecurrentCache())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(recurrence(**given, cache=RecurrentCache()), wanted)
        rounded = recurrence(**given | {"v": given["v"].bfloat16()}, cache=(cache := RecurrentCache()))
    assert rounded.dtype == torch.bfloat16
    assert cache.state.dtype == torch.float32


@pytest.mark.parametrize("recurrence", [decayed_sum, gated_delta])
def test_the_kernels_for_a_gpu_take_what_is_given(recurrence, monkeypatch):
    """Checks the kernels' names and arguments; none is run."""
    asked = []

    def kernels(operation):
        return tuple(map(recorded, _kernels(operation)))

    def recorded(kernel):
        def run(**arguments):
            inspect.signature(kernel).bind(**arguments)
            asked.append(kernel.__name__)
            return arguments["v"], arguments["initial_state"]

        return run

    monkeypatch.setattr("lit_lazy.attention.recurrence._plain_functions", kernels)
    x = torch.zeros(1, 3, 2, 4)
    more = {"beta": x[..., 0]} if recurrence is gated_delta else {}
    recurrence(x, x, x, x[..., 0], **more, cache=RecurrentCache())
    recurrence(*(part[:, :1] for part in (x, x, x, x[..., 0], *more.values())), cache=RecurrentCache())
    name = "gated_delta_rule" if more else "simple_gla"
    assert asked == [f"chunk_{name}", f"fused_recurrent_{name}"]


def layer(mixer, spread=0.4, shape=SHAPE):
    """A layer with all parameters random, away from values at which a formula degenerates."""
    module = mixer.build(shape)
    generator = torch.Generator().manual_seed(2)
    for part in module.modules():
        if isinstance(part, SelfInitialised):
            part.init_parameters(lambda _: generator)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((spread if "norm" not in name else 0.1) * noise)
    return module


def convolved(x, weight, bias=None):
    """Causal depthwise convolution with zero padding, then SiLU."""
    channels, kernel = weight.shape
    padded = F.pad(x.mT, (kernel - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=channels)).mT


def by_heads(x, heads):
    return x.unflatten(-1, (heads, -1))


def of_retnet(layer, x, rotate):
    """The paper's parallel form `(Q K^T * D) V`, D the powers of the decay."""
    heads, length = layer.n_heads, x.shape[1]
    q, k, v = (by_heads(part(x), heads).transpose(1, 2) for part in (layer.q, layer.k, layer.v))
    gamma = 1 - 2.0 ** (-5 - torch.arange(heads).double())
    distance = torch.arange(length)[:, None] - torch.arange(length)
    decay = torch.where(distance >= 0, gamma[:, None, None] ** distance.clamp(min=0), 0)
    out = ((rotate(q) @ rotate(k).mT / math.sqrt(layer.head_dim)) * decay) @ v
    normed = (out - out.mean(-1, keepdim=True)) / (out.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    flat = normed.transpose(1, 2).flatten(2) * layer.norm.weight + layer.norm.bias
    gate = layer.gate(x)
    return layer.out(flat * gate * gate.sigmoid())


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def of_mamba2(layer, x, _rotate):
    """The recurrence of the paper's state space model."""
    width, state, heads = layer.width, layer.state, layer.n_heads
    z, xbc, dt = layer.project(x).split((width, width + 2 * state, heads), -1)
    u, b, c = convolved(xbc, layer.convolution.weight, layer.convolution.bias).split((width, state, state), -1)
    u, dt = by_heads(u, heads), torch.log1p((dt + layer.decay.dt_bias).exp())
    hidden, rows = x.new_zeros(len(x), heads, layer.head_dim, state), []
    for t in range(x.shape[1]):
        a = (-layer.decay.A_log.exp() * dt[:, t]).exp()
        written = dt[:, t, :, None, None] * u[:, t, :, :, None] * b[:, t, None, None]
        hidden = a[..., None, None] * hidden + written
        rows.append((hidden * c[:, t, None, None]).sum(-1) + layer.skip[:, None] * u[:, t])
    return layer.out(rms(torch.stack(rows, 1).flatten(2) * F.silu(z), layer.norm.weight))


def of_gated_delta_net(layer, x, _rotate):
    """The paper's recurrence `S = S (a (I - b k k^T)) + b v k^T`."""
    heads, keys = layer.n_heads, layer.n_heads * layer.key_dim
    weights = layer.convolution.weight.split((keys, keys, 2 * keys))
    q, k, v = (
        by_heads(convolved(part(x), weight), heads)
        for part, weight in zip((layer.q, layer.k, layer.v), weights, strict=True)
    )
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    beta = layer.beta(x).sigmoid()
    a = (-layer.decay.A_log.exp() * F.softplus(layer.dt(x) + layer.decay.dt_bias)).exp()
    state, rows = x.new_zeros(len(x), heads, 2 * layer.key_dim, layer.key_dim), []
    for t in range(x.shape[1]):
        b, key = beta[:, t, :, None, None], k[:, t, :, :, None]
        erase = torch.eye(layer.key_dim, dtype=x.dtype) - b * key @ key.mT
        state = state @ (a[:, t, :, None, None] * erase) + b * v[:, t, :, :, None] @ key.mT
        rows.append((state @ q[:, t, :, :, None])[..., 0] / math.sqrt(layer.key_dim))
    gate = by_heads(layer.gate(x), heads)
    return layer.out((rms(torch.stack(rows, 1), layer.norm.weight) * F.silu(gate)).flatten(2))


FORMULAS = {"RetNet": of_retnet, "Mamba2": of_mamba2, "GatedDeltaNet": of_gated_delta_net}


@torch.no_grad()
@every_mixer
def test_a_layer_is_its_papers_formula(mixer):
    """In float64, except for the recurrence in float32."""
    made = layer(mixer).double()
    x = torch.randn(BATCH, LENGTH, 16, generator=torch.Generator().manual_seed(3)).double()
    rotate = Rope().build(16, 8, 32).double().rotation(LENGTH, 0)
    wanted = FORMULAS[type(mixer).__name__](made, x, rotate)
    torch.testing.assert_close(made(x, PassInputs(rotate))[0], wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item())


def test_the_decays_start_where_the_papers_do():
    made = layer(Mamba2(head_dim=1), spread=0).decay
    assert made.A_log.exp().min() >= 1
    assert made.A_log.exp().max() <= 16
    step = F.softplus(made.dt_bias)
    assert step.min() >= 1e-3 * (1 - 1e-4)
    assert step.max() <= 1e-1 * (1 + 1e-4)
    assert step.min() < 3e-3 < 3e-2 < step.max()


def test_what_cannot_be_is_named():
    with pytest.raises(ValueError, match=r"^Mamba2.head_dim=5: must divide 2 \* model.d_model=32.*$"):
        Mamba2(head_dim=5).build(SHAPE)
    masked = PassInputs(lambda x: x, key_mask=torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"^key_mask: RetNet keeps a state.*$"):
        layer(RetNet())(torch.zeros(1, 2, 16), masked)


@every_mixer
def test_a_machine_without_the_library_is_told_what_brings_it(mixer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    name = type(mixer).__name__
    with pytest.raises(ValueError, match=rf"^model.mixer={name}: needs .*; pip install 'lit-lazy\[fla\]'$"):
        mixer.build(SHAPE)
