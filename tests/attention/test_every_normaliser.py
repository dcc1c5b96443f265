"""Runs the checks of `lit_lazy.testing` on every registered normaliser, with its formula per row."""

import dataclasses
import math

import pytest
import torch

from flash_lazy import lazy_attention
from lit_lazy.attention import (
    AffineScaled,
    ASEntmax,
    AttentionCall,
    AttentionSpec,
    ClippedSoftmax,
    Differential,
    Elastic,
    Entmax15,
    LayerShape,
    LearnedBias,
    NoPosition,
    Normaliser,
    OffByOne,
    Relu,
    Rope,
    Rows,
    Sigmoid,
    SinkLogit,
    Softmax,
    Softpick,
    Sparsemax,
    SSMax,
    Thresholded,
    ThresholdedDifferential,
    TopK,
)
from lit_lazy.attention.rivals import lambda_init
from lit_lazy.config import ModelConfig
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.loss import token_nll
from lit_lazy.testing import SHAPE, check_normaliser
from lit_lazy.training.check_before_run import check_model

CONTEXT = SHAPE.context_length


def softmax(s):
    e = (s - s.max()).exp()
    return e / e.sum()


def elastic(theta):
    return lambda s: torch.stack([max(p - theta(len(s)), p.new_zeros(())) for p in softmax(s)])


def with_sink(b):
    return lambda s: s.exp() / (math.exp(b) + s.exp().sum())


def clipped(g):
    return lambda s: torch.stack([((1 + g(len(s))) * p - g(len(s))).clamp(0, 1) for p in softmax(s)])


def softpick(s):
    e = s.expm1()
    return e.clamp(min=0) / (e.abs().sum() + 1e-8 * s.max().clamp(min=0).exp())


def thresholded(beta, width):
    def weights(s):
        t = beta * math.sqrt(2 * math.log(len(s) + 1) / width)
        return torch.stack([max(x - t, x.new_zeros(())) ** 2 for x in s])

    return weights


def thresholded_difference(beta, width):
    one = thresholded(beta, width)
    return lambda maps: one(maps[0]) - one(maps[1]) / 2


def bisected(power):
    """The t for which the weights `max(s - t, 0) ** power` sum to 1, by bisection; power 1 is sparsemax."""

    def weights(s):
        low, high = s.max() - 1, s.max()
        for _ in range(200):
            t = (low + high) / 2
            low, high = (t, high) if (s - t).clamp(min=0).pow(power).sum() > 1 else (low, t)
        return (s - low).clamp(min=0).pow(power)

    return weights


def top_k(share):
    def weights(s):
        order = sorted(s.tolist(), reverse=True)
        kept = s >= order[math.ceil(round(share * len(s), 6)) - 1]
        return softmax(s.masked_fill(~kept, -math.inf))

    return weights


def differential(maps):
    """Before training the vectors are zero and lambda has its initial value."""
    return softmax(maps[0]) - lambda_init(SHAPE.layer) * softmax(maps[1])


FORMULAS = {  # parameters are float32, and hold these values exactly
    Softmax(): softmax,
    Elastic(): elastic(lambda n: 1 / n),
    Elastic(-0.5): elastic(lambda n: -0.5 / n),
    Elastic(0.75, "per_token"): elastic(lambda n: 0.75 / n),
    Elastic(1.25, "seq_len"): elastic(lambda n: 1.25 / CONTEXT),  # noqa: ARG005
    Elastic(0.0625, "constant"): elastic(lambda n: 0.0625),  # noqa: ARG005
    OffByOne(): with_sink(0),
    SinkLogit(0.75): with_sink(0.75),
    ClippedSoftmax(2.0): clipped(lambda n: 2 / n),
    ClippedSoftmax(length="context"): clipped(lambda n: 3 / CONTEXT),  # noqa: ARG005
    Softpick(): softpick,
    Sigmoid(): lambda s: 1 / (1 + len(s) * (-s).exp()),
    Relu(): lambda s: s.clamp(min=0) / len(s),
    Thresholded(0.25): thresholded(0.25, SHAPE.head_dim),
    ThresholdedDifferential(0.25): thresholded_difference(0.25, SHAPE.head_dim // 2),
    Entmax15(): lambda s: bisected(2)(s / 2),
    Sparsemax(): bisected(1),
    ASEntmax(): lambda s: bisected(2)(s / 2),  # its scale is applied to the queries
    TopK(): top_k(0.25),
    SSMax(): softmax,  # its scale is applied to the queries
    AffineScaled(): lambda s: (softmax(s) - 1 / len(s)) / 2,  # alpha starts at 1/2, its mean at 0
    Differential(): differential,
}
RIVALS = {type(normaliser) for normaliser in FORMULAS} - {Softmax, Elastic}
ONE_OF_EACH_CLASS = {type(normaliser): normaliser for normaliser in reversed(FORMULAS)}.values()
CHECKED = [pytest.param(x, marks=() if x in ONE_OF_EACH_CLASS else pytest.mark.long) for x in FORMULAS]
RENORMALISED = [
    pytest.param(dataclasses.replace(x, renormalise=True), marks=() if x in (Elastic(), Relu()) else pytest.mark.long)
    for x in FORMULAS
    if not isinstance(x, AffineScaled | Differential | ThresholdedDifferential)
]


def test_every_normaliser_is_here():
    shipped = {
        cls for cls in find_leaf_classes(Normaliser).values() if cls.__module__.startswith("lit_lazy.attention.")
    }
    assert {type(normaliser) for normaliser in FORMULAS} == shipped


@pytest.mark.parametrize("normaliser", CHECKED, ids=repr)
def test_keeps_what_users_rely_on(normaliser):
    check_normaliser(normaliser, FORMULAS[normaliser])


def test_a_rule_reads_inputs_that_are_wider_than_its_heads():
    check_model(ModelConfig(d_model=16, n_heads=2, head_dim=4, attention=AttentionSpec(ASEntmax())), context_length=8)


@pytest.mark.parametrize("normaliser", RENORMALISED, ids=repr)
def test_keeps_it_renormalised(normaliser):
    check_normaliser(normaliser)


@pytest.mark.parametrize("normaliser", [x for x in FORMULAS if type(x) in RIVALS], ids=repr)
def test_a_model_of_it_trains_in_bfloat16(normaliser):
    spec = AttentionSpec(normaliser, LearnedBias())
    cfg = ModelConfig(d_model=16, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=16, init_std=0.3, attention=spec)
    model = DecoderLM(cfg, 16, context_length=8, seed=2)
    tokens = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        loss = token_nll(model(tokens), tokens).mean()
    loss.backward()
    assert abs(loss - token_nll(model(tokens), tokens).mean()) < 0.05 * loss
    for name, parameter in model.named_parameters():
        assert not parameter.requires_grad or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("normaliser", [Entmax15(), Sparsemax()])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_entmax_rows_sum_to_one_and_cut_the_same_amount(normaliser, spread):
    """Of few and of many surviving weights: they are s / power minus one amount, to the power; the rest is below it."""
    power = 2 if isinstance(normaliser, Entmax15) else 1
    scores = spread * torch.randn(1, 2, 5, 400, generator=torch.Generator().manual_seed(0))
    scores[..., 0, 64:] = -1e30  # hidden
    scores[..., 1, 1:] = -1e30
    rows = Rows(scores > -1e30, torch.full((1, 1, 5, 1), 400), torch.zeros(1, 1, 5, 1))
    weights = normaliser.build(SHAPE).weights(scores, rows)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 5), rtol=0, atol=1e-6)
    assert torch.equal(weights[..., 1, 0], torch.ones(1, 2))
    amount = scores / power - weights ** (1 / power)
    alive = weights > 1e-6  # the root of a smaller weight is dominated by rounding
    mean = (amount * alive).sum(-1, keepdim=True) / alive.sum(-1, keepdim=True)
    rounding = 1e-5 * max(1.0, spread)
    assert ((amount - mean) * alive).abs().max() <= rounding
    assert (scores / power - mean)[weights == 0].max() <= rounding if (weights == 0).any() else spread == 0


def make_rows(scores):
    """Rows that see all their keys."""
    n = torch.full((1, 1, scores.shape[-2], 1), scores.shape[-1], dtype=scores.dtype)
    return Rows(torch.ones(1, 1, *scores.shape[-2:], dtype=torch.bool), n, n.long())


def test_top_k_keeps_a_share_of_the_visible_keys():
    """Whatever the order of equal scores."""
    scores = torch.randn(2, 4, 3, 100, generator=torch.Generator().manual_seed(0))
    for share, kept in ((0.07, 7), (0.071, 8), (1e-9, 1), (0.5, 50)):
        weights = TopK(share).build(SHAPE).weights(scores, make_rows(scores))
        assert ((weights > 0).sum(-1) == kept).all(), share
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    everything = TopK(1.0).build(SHAPE).weights(scores, make_rows(scores))
    assert torch.equal(everything, scores.softmax(-1))
    scores = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0]).view(1, 1, 1, 5)
    weights = TopK(0.4).build(SHAPE).weights(scores, make_rows(scores))[0, 0, 0]
    torch.testing.assert_close(weights[:4], torch.tensor([2.0, 1.0, 1.0, 1.0]).softmax(-1))
    assert weights[4] == 0


@pytest.mark.parametrize("position", [Rope(), NoPosition()], ids=repr)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_thresholded_attention_compares_directions(position, qk_norm):
    """Scores are cosines, whatever the length of the projected queries and keys; no cosine exceeds 1."""
    spec = AttentionSpec(Thresholded(), qk_norm=qk_norm)
    cfg = ModelConfig(d_model=32, n_heads=2, n_kv_heads=1, d_ff=16, init_std=0.5, position=position, attention=spec)
    model, seen = DecoderLM(cfg, 16, context_length=12, seed=2).double(), []
    attention = model.attentions[0]
    attention.normaliser.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = torch.randint(16, (2, 12), generator=torch.Generator().manual_seed(0))
    before = model(tokens)
    weights = attention.normaliser.compute_weights(seen[0])
    cosine = torch.nn.functional.cosine_similarity(seen[0].q[:, :, :, None], seen[0].k[:, :, None], dim=-1)
    visible = weights.rows.visible.expand_as(cosine)
    torch.testing.assert_close(weights.scores[visible], cosine[visible])
    t = (2 * torch.arange(2, 14, dtype=torch.float64).log() / 16).sqrt()
    torch.testing.assert_close(weights.w, ((cosine - t[:, None]).clamp(min=0) ** 2).tril())
    with torch.no_grad():
        attention.q.weight.mul_(7)
        attention.k.weight.mul_(0.01)
    torch.testing.assert_close(model(tokens), before, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match=r"^Thresholded\.beta=2\.0: no cosine exceeds the threshold of 16 keys"):
        Thresholded(2.0).build(SHAPE)


def make_call(**changes):
    """Queries, keys, values and the layer's input of one sequence, float64."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = torch.randn(3, 1, SHAPE.n_heads, 9, SHAPE.head_dim, dtype=torch.float64, generator=generator)
    x = torch.randn(1, 9, SHAPE.d_model, dtype=torch.float64, generator=generator)
    return AttentionCall(q, k, v, x=x)._replace(**changes)


def test_asentmax_scales_its_queries():
    module = ASEntmax().build(SHAPE).double()
    call, n = make_call(), torch.arange(1, 10, dtype=torch.float64)
    torch.testing.assert_close(module.queries(call), (1 + math.log(2)) * call.q)
    with pytest.raises(ValueError, match=r"^AttentionCall\.x=None: the rule depends on the layer"):
        module(make_call(x=None))
    with torch.no_grad():
        for weight in (module.beta, module.gamma):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    for head, row in ((0, 0), (1, 3), (3, 8)):
        b, c = (float((call.x[0, row] @ weight[head]).detach()) for weight in (module.beta, module.gamma))
        beta, gamma = math.log1p(math.exp(b)), 2 * math.tanh(c)
        expected = (1 + beta * math.log(n[row] + 1) ** gamma) * call.q[0, head, row]
        torch.testing.assert_close(module.queries(call)[0, head, row], expected)


def affine_scaled(mean):
    """A module whose alpha differs by row and head, and a call of it."""
    module = AffineScaled().build(SHAPE).double()
    torch.nn.init.normal_(module.alpha, generator=torch.Generator().manual_seed(2))
    module.mean.fill_(mean)
    return module.eval(), make_call()


def test_affine_scaled_mixes_softmax_and_even_weights():
    module, call = affine_scaled(0.75)
    found = module.compute_weights(call)
    plain = Softmax().build(SHAPE).compute_weights(call).w
    for head, row in ((0, 0), (2, 4), (3, 8)):
        alpha = 1 / (1 + math.exp(-float((call.x[0, row] @ module.alpha[head]).detach())))
        expected = alpha * plain[0, head, row, : row + 1] + (0.75 - alpha) / (row + 1)
        torch.testing.assert_close(found.w[0, head, row, : row + 1], expected)
    torch.testing.assert_close(found.mass, torch.full_like(found.mass, 0.75))
    assert (found.w < 0).any()
    out, stats = module(call._replace(with_stats=True))
    torch.testing.assert_close(out, found.w @ call.v)
    torch.testing.assert_close(stats.mass, found.mass)
    torch.testing.assert_close(stats.first_weight, found.w[..., 0])
    # Where keys are hidden but n is held, it is the row's position.
    call = call._replace(key_mask=(torch.arange(9) >= 2)[None])
    held, plain = module(call._replace(evicted=0))[0], Softmax().build(SHAPE).compute_weights(call)
    alpha, n = module.compute_alpha(call), torch.arange(1, 10)[:, None]
    expected = alpha * plain.w + (module.mean[:, None, None] - alpha) * plain.rows.visible / n
    torch.testing.assert_close(held[:, :, 2:], (expected @ call.v)[:, :, 2:])


def test_the_mean_of_affine_scaled_follows_the_rows_of_training_alone():
    module, call = affine_scaled(0.25)
    expected, mean = module.mean.clone(), module.compute_alpha(call).mean((0, 2, 3))
    module(call)
    with torch.no_grad():
        module.train()(call)
    module.at_progress(0.1)
    assert torch.equal(module.mean, expected), "an evaluation moved it"
    for part in (call.x[:, :4], call.x[:, 4:]):  # a batch in two parts
        rows = part.shape[1]
        module(call._replace(q=call.q[:, :, -rows:], x=part))
    module.at_progress(0.2)
    torch.testing.assert_close(module.mean, 0.9 * expected + 0.1 * mean)
    assert set(module.state_dict()) == {"alpha", "mean"}
    before = module.mean.clone()
    module.at_progress(0.2)  # as where a run resumes
    assert torch.equal(module.mean, before)


def test_a_first_call_in_training_counts_its_own_rows_alone():
    """Not those of the check before it, so that a training which resumes is the one that was not stopped."""
    module, call = affine_scaled(0.25)
    module.train()(call)
    assert module.seen[-1] == call.q.shape[0] * call.q.shape[2]
    assert module.training


@pytest.mark.parametrize("normaliser", [Elastic(renormalise=True), SSMax(), AffineScaled()], ids=repr)
def test_the_weights_of_documents_are_those_of_each_alone(normaliser):
    """Their products with the values are the output; beyond a document every key is hidden."""
    module, (q, k, v) = normaliser.build(SHAPE), torch.randn(3, 1, SHAPE.n_heads, 9, SHAPE.head_dim).double()
    cuts, x = torch.tensor([0, 4, 4, 9], dtype=torch.int32), torch.randn(1, 9, SHAPE.d_model).double()
    call = AttentionCall(q, k, v, renormalise=normaliser.renormalise, x=x, cu_seqlens=cuts)
    module = module.double().eval()
    found = module.compute_weights(call)
    torch.testing.assert_close(found.w @ v, module(call)[0])
    assert not found.w[..., 4:, :4].any()
    assert found.rows.visible[0, 0].sum(-1).tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 5] == found.rows.n.flatten().tolist()
    assert not found.rows.visible[..., 4:, :4].any()


def test_softmax_is_not_divided_again():
    """Not even where that is asked for: its weights sum to 1, and to divide by the sum would only round."""
    q, k, v = torch.randn(3, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    expected = lazy_attention(q, k, v, torch.zeros(2), backend="reference")
    module = Softmax().build(LayerShape(2, 2, 16, 32, 40))
    for renormalise in (False, True):
        out, _ = module(AttentionCall(q, k, v, renormalise=renormalise, backend="reference"))
        assert torch.equal(out, expected)
