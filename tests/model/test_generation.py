"""Generation: cache, one or many prompts, sampling, and eviction against a plain matrix implementation."""

import dataclasses

import pytest
import torch

from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    Elastic,
    Eviction,
    Fire,
    KerpleLog,
    LearnedAbsolute,
    LearnedBias,
    NoPosition,
    Normaliser,
    Rope,
    Softmax,
    T5Bias,
)
from lit_lazy.attention.position import DynamicScaling, GivenFrequencies
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import GREEDY, GeneratedToken, Generation, Sampling, draw, generate

VOCABULARY, CONTEXT = 23, 16
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, init_std=0.5)
LAZY = AttentionSpec(Elastic(), LearnedBias(length=7, init_std=1.0))
PROMPTS = [[5, 3, 9, 11, 2], [7, 1], [4], [8, 0, 6, 2, 22], [1, 2, 3]]


def build(attention=LAZY, **changes):
    cfg = dataclasses.replace(SMALL, attention=attention, **changes)
    return DecoderLM(cfg, VOCABULARY, CONTEXT, seed=3).double()


def by_full_passes(model, prompt, tokens):
    """Greedy, without a cache."""
    found = list(prompt)
    for _ in range(tokens):
        found.append(int(model(torch.tensor([found]))[0, -1].argmax()))
    return found[len(prompt) :]


ALIKE = {
    "lazy": (LAZY, {}),
    "window": (AttentionSpec(Elastic(0.5, "seq_len"), T5Bias(), window=4), {}),
    "no positions": (AttentionSpec(Softmax(), KerpleLog()), {"position": NoPosition()}),
    "learned positions": (LAZY, {"position": LearnedAbsolute()}),
    "a window in one layer, the other unrotated": (
        AttentionSpec(Elastic(), LearnedBias(), window=3, full_layers=(0,), out_bias=True),
        {"position": Rope(skip_layers=(1,)), "mlp_bias": True},
    ),
    "a base that grows with the text": (LAZY, {"position": Rope(100.0, DynamicScaling(4.0, trained_length=3))}),
    "other frequencies for long texts": (
        LAZY,
        {"position": Rope(scaling=GivenFrequencies((1.0, 0.1), (0.5, 0.02), trained_length=8))},
    ),
    "per token": (AttentionSpec(Elastic(0.7, "per_token"), Fire()), {}),
} | {
    name: (AttentionSpec(kind(**({"beta": 0.5} if hasattr(kind, "beta") else {})), Alibi()), {})
    for name, kind in find_leaf_classes(Normaliser).items()
    if kind.__module__.startswith("lit_lazy.")
}


@torch.no_grad()
@pytest.mark.parametrize(("attention", "changes"), ALIKE.values(), ids=ALIKE)
def test_prompts_together_are_continued_as_one_by_one(attention, changes):
    """Greedy and sampled with the prompt's generator."""
    model = build(attention, **changes)
    for layer in model.attentions:
        for tau in (p for name, p in layer.normaliser.named_parameters() if name == "tau" and p.dim() == 2):
            tau += torch.linspace(-0.5, 0.5, CONTEXT)  # make results depend on the position
    together = generate(model, PROMPTS, tokens=6)
    assert together == [generate(model, [prompt], tokens=6)[0] for prompt in PROMPTS]
    assert together == [by_full_passes(model, prompt, 6) for prompt in PROMPTS]


@torch.no_grad()
def test_the_end_of_a_text_ends_it_and_no_other():
    model = build()
    free = generate(model, PROMPTS, tokens=12)
    stop = free[0][4]
    ended = generate(model, PROMPTS, tokens=12, stop=[stop])
    assert ended == [text[: text.index(stop)] if stop in text else text for text in free]
    assert len(ended[0]) <= 4
    order = list(Generation(model, PROMPTS, 2))
    assert order[0] == GeneratedToken(2, free[2][0])  # in order of generation, not prompt by prompt
    assert [drawn.prompt for drawn in order] == [2, 1, 4, 0, 3] * 2


class TestDraws:
    @pytest.mark.parametrize(
        ("sampling", "expected"),
        [
            (Sampling(), [0.5, 0.05, 0.3, 0.15]),
            (Sampling(top_p=0.79), [0.625, 0, 0.375, 0]),
            (Sampling(top_p=0.81), [0.5 / 0.95, 0, 0.3 / 0.95, 0.15 / 0.95]),
            (Sampling(top_p=1e-9), [1, 0, 0, 0]),
            (Sampling(temperature=0.5), [0.25 / 0.365, 0.0025 / 0.365, 0.09 / 0.365, 0.0225 / 0.365]),
            (Sampling(temperature=1e-9), [1, 0, 0, 0]),
            (GREEDY, [1, 0, 0, 0]),
        ],
        ids=str,
    )
    def test_are_of_the_distribution(self, sampling, expected):
        logits = torch.tensor([0.5, 0.05, 0.3, 0.15], dtype=torch.float64).log().expand(2500, -1)
        drawn = draw(logits, sampling, [torch.Generator().manual_seed(i) for i in range(2500)])
        assert (torch.bincount(drawn, minlength=4) / 2500).tolist() == pytest.approx(expected, abs=0.04)

    def test_depend_on_the_seed_and_nothing_else(self):
        model = build()
        torch.manual_seed(1)
        one = generate(model, [[5, 3]] * 3, 8, Sampling(seed=4))
        torch.manual_seed(2)
        assert generate(model, [[5, 3]] * 3, 8, Sampling(seed=4)) == one
        assert generate(model, [[5, 3]] * 3, 8, Sampling(seed=5)) != one
        assert one[0] != one[1]  # a repeated prompt has its own draws
        assert generate(model, [[5, 3]], 8, Sampling(seed=4)) == one[:1]


def test_what_cannot_be_continued_is_refused():
    """Further ones: tests/command/test_generate.py."""
    model = build(position=LearnedAbsolute())
    for prompts, message in (
        ([[1], []], "^prompt 2 has no tokens; give at least one$"),
        ([[1, 23]], "^prompt 1 has the token 23; the model reads 0 to 22$"),
        ([[1] * 10], "17 positions requested, 16 learned"),
    ):
        with pytest.raises(ValueError, match=message):
            Generation(model, prompts, 8)
    assert len(generate(model, prompts, 7)[0]) == 7, "the last token is not read"


def streamed(model, tokens, eviction):
    """Logits `[T, V]` of one sequence by plain matrices over the cached keys, rotated by their cache index."""
    kept: list[list] = [[] for _ in model.blocks]
    logits = []
    for token in tokens:
        x = model.embedding(torch.tensor([[token]]))
        for block, cached in zip(model.blocks, kept, strict=True):
            layer, h = block.attention, block.attention_norm(x)
            q, k, v = (p(h).unflatten(-1, (-1, layer.head_dim))[0, 0] for p in (layer.q, layer.k, layer.v))
            if len(cached) == eviction.first + eviction.window:
                del cached[eviction.first]
            cached.append((k, v))
            n = len(cached)
            turn = model.position.rotation(n, 0)
            keys = turn(torch.stack([k for k, _ in cached], 1)[None])[0]  # [Hkv, n, D]
            query = turn(q[None, :, None].expand(-1, -1, n, -1))[0, :, -1]  # [H, D]
            values = torch.stack([v for _, v in cached], 1)
            heads = []
            for head in range(layer.n_heads):
                of = head // (layer.n_heads // layer.n_kv_heads)
                scores = keys[of] @ query[head] / layer.head_dim**0.5
                terms = layer.bias(n)
                for j in range(n):
                    d = n - 1 - j
                    if terms.table is not None and d < terms.table.shape[1]:
                        scores[j] += terms.table[head, d]
                    if terms.slopes is not None:
                        scores[j] -= terms.slopes[head] * d
                tau = getattr(layer.normaliser, "tau", torch.zeros(layer.n_heads))[head]
                heads.append((scores.softmax(0) - tau / n).clamp(min=0) @ values[of])
            x = x + layer.out(torch.cat(heads))
            x = x + block.mlp(block.mlp_norm(x))
        logits.append(model.head(model.norm(x))[0, 0])
    return torch.stack(logits)


class TestEviction:
    TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()

    @torch.no_grad()
    @pytest.mark.parametrize("kept", [(2, 5), (0, 3), (4, 1), (30, 30)], ids=str)
    @pytest.mark.parametrize(
        "attention", [LAZY, AttentionSpec(Softmax(), Alibi()), AttentionSpec(Elastic(0.4))], ids=str
    )
    def test_is_attention_over_the_tokens_kept_with_positions_in_the_cache(self, attention, kept):
        model, eviction = build(attention), Eviction(*kept)
        cache = model.new_cache(eviction)
        tokens = torch.tensor([self.TOKENS])
        found = torch.cat([model(part, cache) for part in cache[0].split_tokens(tokens)], 1)
        torch.testing.assert_close(found[0], streamed(model, self.TOKENS, eviction))
        assert cache[0].evicted == max(0, 40 - sum(kept))
        assert cache[0].length == min(40, sum(kept))
        assert cache[0].span(1) == (min(41, sum(kept)), 0)  # no position exceeds the capacity

    @torch.no_grad()
    def test_keeps_the_memory_and_the_counts(self):
        model = build()
        run = Generation(model, [[1, 2, 3], [4, 5, 6], [7]], 50, eviction=Eviction(2, 6))
        found = list(run)
        assert len(found) == 150
        assert run.evicted == 2 * (52 - 8) + (50 - 8)
        assert run.cache_bytes == 2 * 2 * 2 * 2 * 8 * 4 * 8  # layers, k and v, prompts, kv heads, tokens, D, float64
        plain = Generation(model, [[1, 2, 3]], 4)
        assert [drawn.token for drawn in plain] == [drawn.token for drawn in found if drawn.prompt == 0][:4]
        assert plain.evicted == 0

    @torch.no_grad()
    def test_of_several_at_once_is_refused(self):
        model = build()
        cache = model.new_cache(Eviction(1, 3))
        model(torch.tensor([[1, 2, 3]]), cache)
        with pytest.raises(ValueError, match=r"^2 tokens for a streaming cache that holds 3 of 4; append them one"):
            model(torch.tensor([[4, 5]]), cache)
