"""Export: transformers' model returns our logits with cache and padding, for every supported part."""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import transformers
from transformers import AutoModelForCausalLM

from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    Bias,
    Elastic,
    Entmax15,
    Fire,
    Gate,
    KerpleLog,
    LearnedAbsolute,
    LearnedBias,
    NoPosition,
    Normaliser,
    OutputGate,
    Position,
    Relu,
    RetNet,
    Rope,
    Sigmoid,
    SinkLogit,
    Softmax,
    SSMax,
    T5Bias,
    ValueGate,
)
from lit_lazy.attention.position import GivenFrequencies, LinearScaling, Llama3Scaling
from lit_lazy.attention.rivals import ClippedSoftmax, Differential, OffByOne, Softpick
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.data.base import SpecialTokens
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.export import modeling_lit_lazy as modelling
from lit_lazy.model.export.folder import CARRIED, check, write
from lit_lazy.model.generation import generate

CACHE = modelling.CACHE
VOCABULARY, CONTEXT, LENGTH = 19, 24, 12
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, init_std=0.5)
LAZY = AttentionSpec(Elastic(), LearnedBias(length=7, init_std=1.0))
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))

VARIANTS = {
    "lazy": {"attention": LAZY},
    "untied": {"attention": LAZY, "tie_embeddings": False, "position": NoPosition()},
    "seq_len, renormalised": {"attention": AttentionSpec(Elastic(0.5, "seq_len", renormalise=True), T5Bias(12, 9))},
    "per token, learned positions": {
        "attention": AttentionSpec(Elastic(0.7, "per_token"), KerpleLog()),
        "position": LearnedAbsolute(),
    },
    "constant, window": {"attention": AttentionSpec(Elastic(0.05, "constant"), Fire(), window=5)},
    "softmax, ALiBi": {"attention": AttentionSpec(Softmax(), Alibi(), gate=OutputGate("head"))},
    "softmax alone": {"attention": AttentionSpec(gate=ValueGate(starts_open=True))},
    "lazy, normed queries": {"attention": AttentionSpec(Elastic(), LearnedBias(init_std=1.0), qk_norm=True)},
    "two maps, normed queries": {"attention": AttentionSpec(Differential(), qk_norm=True), "residual_dropout": 0.1},
    "wide heads, biases, slowed rotation in every second layer": {
        "head_dim": 6,
        "norm_eps": 0.01,
        "attention": AttentionSpec(Elastic(), qkv_bias=True, qk_norm=True),
        "position": Rope(100.0, Llama3Scaling(4.0, trained_length=20), skip_every=2),
    },
    "more biases, a window in one layer, given frequencies in the other": {
        "mlp_bias": True,
        "attention": AttentionSpec(Elastic(), window=5, full_layers=(1,), out_bias=True),
        "position": Rope(scaling=GivenFrequencies((1.0, 0.3)), skip_layers=(1,)),
    },
    "linearly slowed rotation": {"attention": LAZY, "position": Rope(100.0, LinearScaling(3.0))},
    "three heads": {"d_model": 24, "n_heads": 3, "n_kv_heads": 3, "attention": AttentionSpec(Relu(), Alibi())},
    **{
        type(rule).__name__: {"attention": AttentionSpec(rule, LearnedBias(init_std=0.5))}
        for rule in (
            *(OffByOne(), SinkLogit(0.4), ClippedSoftmax(), ClippedSoftmax(2.0, "context"), Softpick(renormalise=True)),
            *(Sigmoid(), SSMax(), Differential()),
        )
    },
}
FUSED = {name for name in VARIANTS if type(VARIANTS[name]["attention"].normaliser) in (Softmax, Elastic)}
"""Parts computed by flash_lazy if it is installed."""
CASES = {f"{name}, torch alone": (changes, False) for name, changes in VARIANTS.items()} | {
    f"{name}, flash_lazy": (VARIANTS[name], True) for name in sorted(FUSED)
}


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Tolerance for double precision models with attention in single precision."""


def build(**changes) -> DecoderLM:
    """A model whose parameters all differ from their initial values."""
    model = DecoderLM(dataclasses.replace(SMALL, **changes), VOCABULARY, CONTEXT, seed=1)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        parameter.data += (0.2 if "attention.normaliser" in name or ".bias." in name else 0.02) * noise
    return model.eval()


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a temporary cache for the copies of imported modelling files."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        yield


def exported(model: DecoderLM, folder: Path) -> Path:
    folder.mkdir()
    write(folder, model, "card", None, SpecialTokens(ends=(0,), pad=0))
    return folder


def load(folder: Path, **options):
    model, found = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize(("changes", "kernels"), CASES.values(), ids=CASES)
def test_logits_are_ours(changes, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without flash_lazy; tests/command/test_export_command.py uses a process where it is not installed."""
    if not kernels:
        monkeypatch.setitem(sys.modules, "flash_lazy", None)
    ours = build(**changes)
    theirs = load(exported(ours, tmp_path / "out"))
    assert (sys.modules[type(theirs).__module__].lazy_attention is not None) is kernels
    # Rounding of single precision products depends on the machine, so compare all else in double.
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-4, atol=1e-4)
    ours, theirs = ours.double(), theirs.double()
    logits = ours(TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, logits, **CLOSE)
    assert logits.std() > 0.1
    # Incrementally, with a cache.
    cache, parts = None, []
    for part in TOKENS.split([5, 1, 6], 1):
        out = theirs(part, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), logits, **CLOSE)
    # With left padding, which has no effect.
    real = torch.ones_like(TOKENS)
    real[1, :4] = 0
    padded = theirs(TOKENS.where(real > 0, 3), attention_mask=real).logits[1, 4:]
    torch.testing.assert_close(padded, ours(TOKENS[1:, 4:])[0], **CLOSE)
    # Generated, with padding too.
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    prompts = [TOKENS[0].tolist(), TOKENS[1, 4:].tolist()]
    for use_cache in (True, False):
        options["use_cache"] = use_cache
        found = theirs.generate(TOKENS.where(real > 0, 3), attention_mask=real, **options)[:, LENGTH:]
        assert found.tolist() == generate(ours, prompts, 6)


@pytest.mark.parametrize(("changes", "kernels"), CASES.values(), ids=CASES)
def test_positions_that_restart_begin_a_document(
    changes, kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers' own models read packed texts without padding."""
    if not kernels:
        monkeypatch.setitem(sys.modules, "flash_lazy", None)
    model = load(exported(build(**changes), tmp_path / "out")).double()
    rows = [[5, 7], [1, 8, 3]]
    position = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    for use_cache in (True, False):
        packed = model(TOKENS, position_ids=position, use_cache=use_cache).logits
        for tokens, logits, row in zip(TOKENS, packed, rows, strict=True):
            for document, found in zip(tokens.split(row), logits.split(row), strict=True):
                torch.testing.assert_close(found, model(document[None]).logits[0], **CLOSE)


def test_the_logits_to_keep_are_chosen_as_by_transformers(tmp_path: Path) -> None:
    model = load(exported(build(attention=LAZY), tmp_path / "out"))
    whole = model(TOKENS).logits
    index, mask = torch.tensor([0, 3, 11]), torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    for kept, expected in (
        (3, whole[:, -3:]),
        (index, whole[:, index]),
        (index.expand(2, -1), whole[:, index]),
        (mask, whole[mask]),
    ):
        torch.testing.assert_close(model(TOKENS, logits_to_keep=kept).logits, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_saved_again_it_is_the_same_to_the_bit(tied: bool, tmp_path: Path) -> None:
    model = load(exported(build(attention=LAZY, tie_embeddings=tied), tmp_path / "out"))
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "modeling_lit_lazy.py").read_text() == Path(modelling.__file__).read_text()
    again = load(tmp_path / "again")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert (again.head.weight is again.embedding.weight) is tied
    state = build(attention=LAZY, tie_embeddings=tied).state_dict()
    assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())
    assert again.state_dict().keys() == state.keys()


SMALL_PARTS = ("normaliser", "attention.bias")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("lazy", torch.bfloat16),
        ("lazy", torch.float16),
        ("constant, window", torch.bfloat16),
        ("Differential", torch.half),
    ],
)
def test_tau_and_bias_stay_float32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """For every way to request a dtype, bit for bit, also after saving."""
    ours = build(**VARIANTS[name])
    folder = exported(ours, tmp_path / "out")
    half = load(folder, dtype=dtype)
    half.save_pretrained(tmp_path / "half")
    for model in (half, load(folder).to(dtype), load(tmp_path / "half")):
        kept = {name: x for name, x in model.state_dict().items() if any(part in name for part in SMALL_PARTS)}
        assert kept
        assert all(torch.equal(x, ours.state_dict()[name]) and x.dtype == torch.float32 for name, x in kept.items())
        others = {x.dtype for name, x in model.state_dict().items() if name not in kept}
        assert others == {dtype}
        logits = model(TOKENS).logits
        assert logits.dtype == dtype
        assert (logits.float() - ours(TOKENS)).std() < 0.05 * ours(TOKENS).std()
    # A wider dtype is exact.
    assert {x.dtype for x in load(folder).double().parameters()} == {torch.float64}


def test_it_learns_from_labels(tmp_path: Path) -> None:
    model = load(exported(build(attention=LAZY), tmp_path / "out")).train()
    with torch.enable_grad():
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())
    expected = torch.nn.functional.cross_entropy(model(TOKENS).logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(model(TOKENS, labels=TOKENS).loss, expected)


def test_what_the_model_cannot_serve_is_said(tmp_path: Path) -> None:
    fire = load(exported(build(attention=AttentionSpec(Elastic(), Fire())), tmp_path / "fire"))
    learned = load(exported(build(position=LearnedAbsolute()), tmp_path / "learned"))
    for model, named in (
        (fire, "FIRE supports 24 keys, and the text has 25"),
        (learned, "24 positions are learned, and the text has 25"),
    ):
        with pytest.raises(ValueError, match=named):
            model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))
        with pytest.raises(ValueError, match="a DynamicCache"):
            model.generate(TOKENS, max_new_tokens=2, cache_implementation="static")


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_the_name_of_any_version(name: str, tmp_path: Path) -> None:
    model = load(exported(build(), tmp_path / "out"))
    whole = model(TOKENS).logits
    cache = transformers.DynamicCache()
    parts = [model(part, **{name: cache}).logits for part in TOKENS.split([5, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    assert cache.get_seq_length() == LENGTH


def test_keywords_without_effect_are_refused(tmp_path: Path) -> None:
    model = load(exported(build(), tmp_path / "out"))
    cache = transformers.DynamicCache()
    logits = model(TOKENS, output_attentions=False, output_hidden_states=None).logits
    assert torch.equal(model(TOKENS, return_dict=False)[0], logits)
    for name in ("output_attentions", "output_hidden_states"):
        with pytest.raises(ValueError, match=rf"{name}.*: not supported; leave them out"):
            model(TOKENS, **{name: True})
    with pytest.raises(ValueError, match=r"cache, past_key_values: .*; give one"):
        model(TOKENS, cache=cache, past_key_values=cache)
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_store'"):
        model(TOKENS, kv_store=cache)


def test_the_parts_are_those_of_the_modelling_file() -> None:
    assert {
        "normaliser": list(modelling.RULES),
        "bias": list(modelling.BIASES),
        "gate": list(modelling.GATES),
        "position": list(modelling.POSITIONS),
        "scaling": list(modelling.SCALINGS),
    } == CARRIED
    ours = {
        name: {kind for kind, cls in find_leaf_classes(base).items() if cls.__module__.startswith("lit_lazy.")}
        for name, base in {"normaliser": Normaliser, "bias": Bias, "gate": Gate, "position": Position}.items()
    }
    assert {name: found - {*CARRIED[name]} for name, found in ours.items()} == {
        "normaliser": {
            "ASEntmax",
            "AffineScaled",
            "Entmax15",
            "Sparsemax",
            "Thresholded",
            "ThresholdedDifferential",
            "TopK",
        },
        "bias": set(),
        "gate": {"HeadNorm"},
        "position": set(),
    }


def test_other_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"^model\.attention\.normaliser=Entmax15: not supported by the exported modelling file"
    ):
        check(ModelConfig(attention=AttentionSpec(Entmax15())))

    with monkeypatch.context() as patch:
        patch.setattr(Rope, "__module__", "users_file")  # a custom class with one of our names
        with pytest.raises(ValueError, match=r"^model\.position=Rope: not supported by the exported modelling file"):
            check(ModelConfig(position=Rope()))
    with pytest.raises(ValueError, match=r"^model\.mixer=RetNet: the exported modelling file supports only attention"):
        check(ModelConfig(mixer=RetNet()))

    @dataclasses.dataclass(frozen=True)
    class Later(ModelConfig):
        twist: str = "none"

    check(Later())
    with pytest.raises(ValueError, match=r"^model\.twist='left': not supported by the exported modelling file"):
        check(Later(twist="left"))


def test_the_config_names_the_end_of_a_text(tmp_path: Path) -> None:
    folder = exported(build(), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["max_position_embeddings"]) == (0, 0, CONTEXT)
    assert load(folder).generation_config.eos_token_id == 0
