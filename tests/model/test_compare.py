"""The comparison of an imported model with its source sees whatever is wrong with it."""

from typing import Any

import pytest
import torch
from published import LONGROPE, SIZES, transformers

from lit_lazy.attention.position import NoScaling
from lit_lazy.config import replace_at
from lit_lazy.model.import_compare import compare
from lit_lazy.model.import_convert import build, convert

LONG = {"max_position_embeddings": 256}
FAR = {"max_position_embeddings": 2**20}
NEARLY = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 1.000005}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 5.0, 7.0], "partial_rotary_factor": 1.0}
FROM_64, FROM_600 = (
    {"rope_parameters": LONGROPE | FACTORS | {(name := "original_max_position_embeddings"): n}, name: n}
    for n in (64, 600)
)
WINDOWS = {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}
WRONG: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "a window longer than the shortest text": ("Mistral", {"sliding_window": 100}, "attention.window", 101),
    "no window in any layer": ("Qwen2", WINDOWS, "attention.window", None),
    "a window in a layer without": ("Qwen2", WINDOWS, "attention.full_layers", (0,)),
    "a layer that rotates": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1]}, "position.skip_layers", ()),
    "another base": ("Llama", {}, "position.base", 10100.0),
    "a scaling beyond the context": ("Llama", {"rope_parameters": DYNAMIC}, "position.scaling.factor", 5.0),
    "a scaling from another length on": ("Phi3", FROM_64, "position.scaling.trained_length", 80),
    "a window beyond every length": ("Mistral", {"sliding_window": 600}, "attention.window", None),
    "a scaling beyond every length": ("Phi3", FROM_600, "position.scaling.long", ()),
    "nearly the same base": ("Llama", FAR, "position.base", 10000.05),
    "a scaling by nearly one": ("Llama", {**FAR, "rope_parameters": NEARLY}, "position.scaling", NoScaling()),
    "another epsilon": ("Llama", {"rms_norm_eps": 1e-2}, "norm_eps", 2e-2),
}


def make(name, changes):
    torch.manual_seed(0)
    settings = {"vocab_size": 304, **SIZES, **LONG, **changes}
    config = getattr(transformers, f"{name}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model, convert(model)


def change(model, settings):
    return build(replace_at(model.cfg, settings), model.state_dict(), model.context_length)


@pytest.mark.parametrize(("name", "changes", "path", "value"), WRONG.values(), ids=WRONG)
def test_a_wrong_setting_is_refused(name, changes, path, value):
    model, new = make(name, changes)
    assert "within" in compare(model, new)
    with pytest.raises(ValueError, match="the logits differ from those of transformers' "):
        compare(model, change(new, {path: value}))


@pytest.mark.parametrize("name", ["embedding.weight", "blocks.2.attention.k.bias", "blocks.3.mlp.up.weight"])
def test_wrong_weights_are_refused(name):
    model, new = make("Qwen2", {})
    assert new.state_dict()[name].data_ptr() in {weight.data_ptr() for weight in model.parameters()}, "shared"
    changed = new.state_dict()[name].clone()
    changed[0] += 0.5
    with pytest.raises(ValueError, match="of their spread"):
        compare(model, build(new.cfg, new.state_dict() | {name: changed}, new.context_length))


def test_two_windows_are_refused():
    model, _ = make("Qwen2", WINDOWS)
    model.model.layers[3].self_attn.register_forward_pre_hook(
        lambda _, args, options: (args, options | {"attention_mask": options["attention_mask"] // 2}), with_kwargs=True
    )
    with pytest.raises(ValueError, match=r"sliding_window: layers with windows of \[50, 100\] keys"):
        convert(model)


def test_in_a_large_model_one_layer_of_each_window_is_compared(monkeypatch):
    monkeypatch.setattr("lit_lazy.model.import_compare.MOST_PRODUCTS", 1)
    model, new = make("Qwen2", WINDOWS)
    compare(model, new)
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    with pytest.raises(ValueError, match="the logits differ"):
        compare(model, change(new, {"attention.window": 101}))


def test_a_window_that_is_too_long_to_compare_is_named(monkeypatch):
    monkeypatch.setattr("lit_lazy.model.import_compare.LONGEST", 120)
    model, new = make("Mistral", {"sliding_window": 100})
    assert compare(model, new).endswith("; no text was longer than the window of 100")
