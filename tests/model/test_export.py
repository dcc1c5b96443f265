"""Export: transformers' model returns our logits with cache and padding, for every part, and for a user's."""

import ast
import copy
import dataclasses
import json
import os
import re
import sys

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import accelerate
import transformers
from transformers import AutoModelForCausalLM

from lit_lazy.attention import (
    Alibi,
    AttentionSpec,
    Bias,
    Elastic,
    Fire,
    Gate,
    HeadNorm,
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
from lit_lazy.attention.position import DynamicScaling, GivenFrequencies, LinearScaling, Llama3Scaling, RopeScaling
from lit_lazy.attention.rivals import ClippedSoftmax, Differential, Softpick, Thresholded, ThresholdedDifferential
from lit_lazy.config.schema import ModelConfig
from lit_lazy.config.serialisation import find_leaf_classes
from lit_lazy.config.user_files import load_module
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.model import modeling_lit_lazy as modelling
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.export_folder import collect_code, write
from lit_lazy.model.export_sources import collect_sources
from lit_lazy.model.generation import generate
from lit_lazy.support.imported_code import OWN

CACHE = modelling.CACHE
VOCABULARY, CONTEXT, LENGTH = 19, 24, 12
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, init_std=0.5)
LAZY = AttentionSpec(Elastic(), LearnedBias(length=7, init_std=1.0))
TOKENS = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))


def list_shipped(base):
    found = find_leaf_classes(base)
    return [found[name] for name in sorted(found) if found[name].__module__.startswith("lit_lazy.")]


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
    "rotation slowed by the length": {"attention": LAZY, "position": Rope(100.0, DynamicScaling(2.0, 8))},
    "three heads": {"d_model": 24, "n_heads": 3, "n_kv_heads": 3, "attention": AttentionSpec(Relu(), Alibi())},
    "a norm of each head": {"attention": AttentionSpec(Sigmoid(), T5Bias(), window=4, gate=HeadNorm())},
    **{
        f"{rule!r}": {"attention": AttentionSpec(rule, LearnedBias(init_std=0.5))}
        for rule in (
            *(SinkLogit(0.4), ClippedSoftmax(), ClippedSoftmax(2.0, "context"), Softpick(renormalise=True)),
            *(SSMax(), Thresholded(0.3), ThresholdedDifferential(0.2)),
        )
    },
}
TRIED = {type(changes["attention"].normaliser) for changes in VARIANTS.values() if "attention" in changes}
OTHERS = [cls for cls in list_shipped(Normaliser) if cls not in TRIED]
VARIANTS |= {cls.__name__: {"attention": AttentionSpec(cls(), LearnedBias(init_std=0.5))} for cls in OTHERS}
FUSED = {name for name in VARIANTS if type(VARIANTS[name]["attention"].normaliser) in (Softmax, Elastic, Differential)}
"""Parts computed by flash_lazy if it is installed."""
FUSED -= {"untied", "linearly slowed rotation", "rotation slowed by the length"}  # for it, calls as of "lazy"
CASES = {f"{name}, torch alone": (changes, False) for name, changes in VARIANTS.items()} | {
    f"{name}, flash_lazy": (VARIANTS[name], True) for name in sorted(FUSED)
}


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
"""Tolerance for double precision models with attention in single precision."""


def build(**changes):
    """A model whose parameters all differ from their initial values."""
    model = DecoderLM(dataclasses.replace(SMALL, **changes), VOCABULARY, CONTEXT, seed=1)
    tensors = *model.named_parameters(), *((name, x) for name, x in model.named_buffers() if name.endswith("mean"))
    for i, (name, x) in enumerate(tensors):
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        x.data += (0.2 if "attention.normaliser" in name or ".bias." in name else 0.02) * noise
    return model.eval()


@pytest.fixture(autouse=True)
def _quiet(module_cache):  # noqa: ARG001
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        yield


def exported(model, folder):
    folder.mkdir()
    write(folder, model, "card", None, SpecialTokens(ends=(0,), pad=0))
    return folder


def load(folder, **options):
    options |= {"trust_remote_code": True, "output_loading_info": True}
    model, found = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize(("changes", "kernels"), CASES.values(), ids=CASES)
def test_logits_are_ours(changes, kernels, tmp_path, monkeypatch):
    """With and without flash_lazy; tests/command/test_export_command.py uses a process where it is not installed."""
    if not kernels:
        monkeypatch.setitem(sys.modules, "flash_lazy", None)
    check_logits(build(**changes), tmp_path / "out", kernels)


def check_logits(ours, folder, kernels):
    theirs = load(exported(ours, folder))
    assert (sys.modules[type(theirs).__module__].flash_lazy is not None) is kernels
    # Rounding of single precision products depends on the machine, so compare all else in double.
    torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=1e-4, atol=1e-4)
    ours, theirs = ours.double(), theirs.double()
    logits = ours(TOKENS)
    torch.testing.assert_close(theirs(TOKENS).logits, logits, **CLOSE)
    assert logits.std() > 0.1
    assert dict(theirs.named_parameters()).keys() == {name for name, x in ours.named_parameters() if x.requires_grad}
    assert theirs.config.keys_to_ignore_at_inference == [CACHE]  # Trainer adds it to a list
    check_documents(theirs)
    check_offload(theirs)
    real = torch.ones_like(TOKENS)
    real[1, :4] = 0
    if not ours.position.keeps_rotation(1, LENGTH):
        cache = theirs(TOKENS[:, :5], use_cache=True)[CACHE]
        with pytest.raises(ValueError, match=f"{CACHE}: its keys .* {LENGTH} tokens need; give use_cache=False"):
            theirs(TOKENS[:, 5:], **{CACHE: cache})
        with pytest.raises(ValueError, match=f"texts of {LENGTH - 4} and {LENGTH} tokens rotate .*; give each alone"):
            theirs(TOKENS, attention_mask=real)
        return
    # Incrementally, with a cache.
    cache, parts = None, []
    for part in TOKENS.split([5, 1, 6], 1):
        out = theirs(part, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), logits, **CLOSE)
    # With left padding, which has no effect.
    padded = theirs(TOKENS.where(real > 0, 3), attention_mask=real).logits[1, 4:]
    torch.testing.assert_close(padded, ours(TOKENS[1:, 4:])[0], **CLOSE)
    # With right padding.
    padded = theirs(TOKENS, attention_mask=real.flip(1)).logits[1, :-4]
    torch.testing.assert_close(padded, ours(TOKENS[1:, :-4])[0], **CLOSE)
    # Generated, with padding too.
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    expected = generate(ours, [TOKENS[0].tolist(), TOKENS[1, 4:].tolist()], 4)
    for use_cache in (True, False):
        options["use_cache"] = use_cache
        found = theirs.generate(TOKENS.where(real > 0, 3), attention_mask=real, **options)[:, LENGTH:]
        assert found.tolist() == expected


def check_documents(model):
    """Positions that restart begin a document, as transformers' own models read packed texts without padding."""
    rows = [[5, 7], [1, 8, 3]]
    position = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])
    for use_cache in (True, False):
        packed = model(TOKENS, position_ids=position, use_cache=use_cache).logits
        for tokens, logits, row in zip(TOKENS, packed, rows, strict=True):
            for document, found in zip(tokens.split(row), logits.split(row), strict=True):
                torch.testing.assert_close(found, model(document[None]).logits[0], **CLOSE)


def check_offload(model):
    """accelerate's hooks give a module its weights and constants only for a call of that module."""
    expected = model(TOKENS, output_attentions=True)
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), torch.device("cpu"), offload_buffers=True)
    assert {x.device.type for x in (*offloaded.parameters(), *offloaded.buffers())} == {"meta"}
    found = offloaded(TOKENS, output_attentions=True)
    for one, other in zip((found.logits, *found.attentions), (expected.logits, *expected.attentions), strict=True):
        assert torch.equal(one, other)


RULE = """
from dataclasses import dataclass

import torch
import shapes as forms
from lit_lazy.attention import Gate, Normaliser, NormaliserModule
from lit_lazy.attention.layer import GateModule
from lit_lazy.config import experiment
from shapes import LIMIT as MOST

ABSENT = experiment("none") if MOST < 0 else None
RISE = {}
RISE["late"] = 2.0  # what a rule reads may be filled later


@dataclass(frozen=True)
class Own(Normaliser):
    power: float = 2.0

    def build(self, shape):
        return OwnModule(shape.n_heads, self.power)


class OwnModule(NormaliserModule):
    can_zero = True

    def __init__(self, n_heads, power):
        super().__init__()
        self.power = power
        self.shift = torch.nn.Parameter(torch.full((n_heads,), 0.1))
        self.register_buffer("unit", torch.linspace(1, 2, n_heads), persistent=False)

    def weights(self, scores, rows):
        from shapes import bend

        theta = (self.shift * self.unit)[:, None, None].to(scores.dtype) / rows.n
        late = rows.position.clamp(max=MOST) / MOST * RISE["late"]
        weights = bend((scores.softmax(-1) - theta).relu(), self.power) * (1 + late) * forms.scale()
        return weights.masked_fill(~rows.visible, 0)


@dataclass(frozen=True)
class OwnGate(Gate):
    def build(self, shape):
        return OwnGateModule(shape.n_heads)


class OwnGateModule(GateModule):
    def __init__(self, n_heads):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 2, n_heads)[:, None, None])

    def forward(self, out, x, v):
        return out * forms.bend(self.gain, MOST).to(out.dtype)


def config():
    return experiment("backcopy_tiny")
"""
SHAPES = """
import numpy

LIMIT = 7


def bend(x, power):
    return x**power if power != 1 else x


def scale() -> float:
    return 3.0


def unused():
    return numpy.zeros(3)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's file, which imports the file next to it."""
    monkeypatch.delitem(sys.modules, "shapes", raising=False)
    (tmp_path / "own-rule.py").write_text(RULE)
    (tmp_path / "shapes.py").write_text(SHAPES)
    return load_module(tmp_path / "own-rule.py")


@pytest.mark.parametrize("kernels", [True, False])
def test_a_users_parts_are_exported_with_the_files_that_they_import(own, kernels, tmp_path, monkeypatch):
    if not kernels:
        monkeypatch.setitem(sys.modules, "flash_lazy", None)
    spec = AttentionSpec(own.Own(), Alibi(), gate=own.OwnGate())
    check_logits(build(attention=spec), tmp_path / "out", kernels)
    custom = {path.name: path.read_text() for path in (tmp_path / "out").glob("custom_*")}
    assert custom.keys() == {"custom_own_rule.py", "custom_shapes.py"}
    assert not re.search("numpy|experiment|unused|ABSENT|config", "".join(custom.values()))
    half = load(tmp_path / "out", dtype=torch.bfloat16)
    rule = half.blocks[0].attention.normaliser
    assert rule.shift.dtype == rule.unit.dtype == torch.float32
    assert torch.equal(rule.unit, torch.linspace(1, 2, SMALL.n_heads))


def test_a_folder_imports_nothing_of_ours():
    """Except flash_lazy, where it is installed."""
    classes = [cls for base in (Normaliser, Bias, Gate, Position, RopeScaling) for cls in list_shipped(base)]
    for file, text in collect_sources(classes).items():
        nodes = [*ast.walk(ast.parse(text))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        ours = {name for name in names if name.partition(".")[0] in OWN}
        assert ours == ({"flash_lazy"} if file == "lit_lazy_export_stand_in.py" else set())


def test_keywords_mean_what_they_mean_in_transformers(tmp_path):
    """Logits to keep, a cache by the name of any version; what contradicts itself is refused."""
    folder = exported(build(attention=LAZY), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"], config["max_position_embeddings"]) == (0, 0, CONTEXT)
    model = load(folder)
    assert model.generation_config.eos_token_id == 0
    whole = model(TOKENS).logits
    index, mask = torch.tensor([0, 3, 11]), torch.rand(TOKENS.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen = (3, whole[:, -3:]), (index, whole[:, index]), (index.expand(2, -1), whole[:, index]), (mask, whole[mask])
    for kept, expected in chosen:
        torch.testing.assert_close(model(TOKENS, logits_to_keep=kept).logits, expected)
    for name in ("cache", "past_key_values"):
        cache = transformers.DynamicCache()
        parts = [model(part, **{name: cache}).logits for part in TOKENS.split([5, 7], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
        assert cache.get_seq_length() == LENGTH
    assert torch.equal(model(TOKENS, output_attentions=False, output_hidden_states=None, return_dict=False)[0], whole)
    packed = torch.arange(LENGTH)[None] % 5
    for options, message in (
        ({"position_ids": packed, "output_attentions": True}, "output_attentions: "),
        ({"cache": cache, "past_key_values": cache}, "cache, past_key_values: .*; give one"),
        ({"kv_store": cache}, "unexpected keyword argument 'kv_store'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model(TOKENS, **options)


def test_what_the_model_cannot_serve_is_said(tmp_path):
    model = load(exported(build(position=LearnedAbsolute()), tmp_path / "out"))
    with pytest.raises(ValueError, match="25 positions requested, 24 learned"):
        model(torch.zeros(1, CONTEXT + 1, dtype=torch.long))
    with pytest.raises(ValueError, match="a DynamicCache"):
        model.generate(TOKENS, max_new_tokens=2, cache_implementation="static")
    for hidden in ([5], [0, 1, 5], [5, LENGTH - 1]):
        mask = torch.ones_like(TOKENS)
        mask[1, hidden] = 0
        for past in (0, LENGTH - 1):  # all at once, and the last token after a cache
            cache = model(TOKENS[:, :past])[CACHE] if past else None
            with pytest.raises(ValueError, match="attention_mask: is 0 between tokens with 1, "):
                model(TOKENS[:, past:], attention_mask=mask, **{CACHE: cache})


@pytest.mark.parametrize("tied", [True, False])
def test_saved_again_it_is_the_same_to_the_bit(tied, tmp_path):
    model = load(exported(build(attention=LAZY, tie_embeddings=tied), tmp_path / "out"))
    model.save_pretrained(tmp_path / "again")
    code = [{path.name: path.read_text() for path in (tmp_path / name).glob("*.py")} for name in ("out", "again")]
    assert code[0] == code[1]
    again = load(tmp_path / "again")
    assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    assert (again.head.weight is again.embedding.weight) is tied
    ours = build(attention=LAZY, tie_embeddings=tied)
    state = ours.state_dict() | dict(ours.named_buffers())
    assert all(torch.equal(x, state[name]) for name, x in again.state_dict().items())
    assert again.state_dict().keys() == state.keys()


@pytest.mark.parametrize("implementation", ["eager", None])
def test_layers_on_the_disk(implementation, tmp_path):
    folder = exported(build(**VARIANTS["per token, learned positions"]), tmp_path / "out")
    options = {"attn_implementation": implementation}
    devices = {
        "embedding": "cpu",
        "position": "disk",
        "blocks.0": "cpu",
        "blocks.1": "disk",
        "norm": "disk",
        "head": "cpu",
    }
    model = load(folder, device_map=devices, offload_folder=tmp_path / "weights", offload_buffers=True, **options)
    assert torch.equal(model(TOKENS).logits, load(folder, **options)(TOKENS).logits)


SMALL_PARTS = ("normaliser", "attention.bias", "position.frequency")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("lazy", torch.bfloat16), ("two maps, normed queries", torch.half), ("softmax, ALiBi", torch.bfloat16)],
)
def test_tau_and_bias_stay_float32(name, dtype, tmp_path):
    """For every way to request a dtype, bit for bit, also after saving."""
    ours = build(**VARIANTS[name])
    state = ours.state_dict() | dict(ours.named_buffers())
    folder = exported(ours, tmp_path / "out")
    half = load(folder, dtype=dtype)
    half.save_pretrained(tmp_path / "half")
    for model in (half, load(folder).to(dtype), load(tmp_path / "half")):
        kept = {name: x for name, x in model.state_dict().items() if any(part in name for part in SMALL_PARTS)}
        assert kept
        assert all(torch.equal(x, state[name]) and x.dtype == torch.float32 for name, x in kept.items())
        others = {x.dtype for name, x in model.state_dict().items() if name not in kept}
        assert others == {dtype}
        logits = model(TOKENS).logits
        assert logits.dtype == dtype
        assert (logits.float() - ours(TOKENS)).std() < 0.05 * ours(TOKENS).std()
    # A wider dtype is exact.
    assert {x.dtype for x in load(folder).double().parameters()} == {torch.float64}


def test_it_learns_from_labels(tmp_path):
    model = load(exported(build(attention=LAZY), tmp_path / "out")).train()
    with torch.enable_grad():
        model(TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None and p.grad.count_nonzero() for p in model.parameters())
    expected = torch.nn.functional.cross_entropy(model(TOKENS).logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
    torch.testing.assert_close(model(TOKENS, labels=TOKENS).loss, expected)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("per token, learned positions", "eager"), ("AffineScaled", "eager"), ("two maps, normed queries", None)],
)
def test_attentions_and_hidden_states_are_ours(name, implementation, tmp_path):
    ours = build(**VARIANTS[name])
    model = load(exported(ours, tmp_path / "out"), attn_implementation=implementation).double()
    ours = ours.double()
    calls, streams = [], []
    for block in ours.blocks:
        block.attention.normaliser.register_forward_pre_hook(lambda _, inputs: calls.append(inputs[0]))
        block.register_forward_hook(lambda *passed: streams.append(passed[2][0]))
    logits = ours(TOKENS)
    found = model(TOKENS, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(found.logits, logits, **CLOSE)
    pairs = zip(ours.blocks, calls, strict=True)
    expected = tuple(block.attention.normaliser.compute_weights(call).w for block, call in pairs)
    torch.testing.assert_close(found.attentions, expected, **CLOSE)
    states = ours.embed(TOKENS), *streams[:-1], ours.norm(streams[-1])
    torch.testing.assert_close(found.hidden_states, states, **CLOSE)
    # Of a padded text, and of generated tokens.
    seen = torch.ones_like(TOKENS)
    seen[1, :4] = 0
    padded = model(TOKENS, attention_mask=seen, output_attentions=True).attentions
    alone = model(TOKENS[1:, 4:], output_attentions=True).attentions
    for whole, cut in zip(padded, alone, strict=True):
        torch.testing.assert_close(whole[1:, :, 4:, 4:], cut, **CLOSE)
        assert not whole[1, :, :, :4].any()
    options = {"max_new_tokens": 2, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    whole = torch.ones_like(TOKENS)  # transformers would hide tokens that equal the padding token
    steps = model.generate(TOKENS, attention_mask=whole, output_attentions=True, **options).attentions
    assert [step[0].shape[2:] for step in steps] == [(LENGTH, LENGTH), (1, LENGTH + 1)]


def test_every_part_of_ours_is_tried():
    specs = [changes.get("attention", AttentionSpec()) for changes in VARIANTS.values()]
    positions = [changes.get("position", Rope()) for changes in VARIANTS.values()]
    scalings = [position.scaling for position in positions if isinstance(position, Rope)]
    parts = [part for spec in specs for part in (spec.normaliser, spec.bias, spec.gate)] + positions + scalings
    shipped = [cls for base in (Normaliser, Bias, Gate, Position, RopeScaling) for cls in list_shipped(base)]
    assert {type(part) for part in parts} == {*shipped}


ODD = {
    "import forms.late": ("forms.late.LATE", "`import forms.late` cannot be exported; give it a name by `as`"),
    "from forms.late import *": ("LATE", "uses LATE, which cannot be exported, since nothing defines it there"),
    "from forms import other": ("other", "uses other, which cannot be exported"),
    "import forms": ("forms.other", "uses forms.other, which cannot be exported"),
}


@pytest.mark.parametrize("line", ODD)
def test_what_a_user_s_rule_cannot_be_exported_with_is_named(line, tmp_path, monkeypatch):
    for name in ("forms", "forms.late"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "forms").mkdir()
    (tmp_path / "forms" / "__init__.py").write_text("def __getattr__(name):\n    return 2.0\n")
    (tmp_path / "forms" / "late.py").write_text("LATE = 1.0\n")
    use, problem = ODD[line]
    rule = f"class Odd(Normaliser):\n    def build(self, shape):\n        return {use}\n"
    path = tmp_path / "odd.py"
    path.write_text(f"from lit_lazy.attention import Normaliser\n{line}\n\n{rule}")
    with pytest.raises(ValueError, match=re.escape(f"odd.py: {problem}")):
        collect_code(ModelConfig(attention=AttentionSpec(load_module(path).Odd())))


def test_what_the_modelling_file_does_not_know_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Later(ModelConfig):
        twist: str = "none"

    collect_code(Later())
    for cfg, named in ((ModelConfig(mixer=RetNet()), "mixer=RetNet: the"), (Later(twist="left"), "twist='left': not")):
        with pytest.raises(ValueError, match=f"^model.{named} .*exported modelling file"):
            collect_code(cfg)
