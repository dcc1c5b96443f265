"""The Hugging Face example: a Llama with Lazy Attention trains, reloads, generates, and supports padding."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported; tests must not use the network

import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flash_lazy

SIZES = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def example():
    path = Path(flash_lazy.__path__[0]).parent / "examples" / "hugging_face.py"
    spec = importlib.util.spec_from_file_location("hugging_face_example", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    transformers.utils.logging.disable_progress_bar()
    return module


@pytest.fixture
def ids():
    return torch.randint(SIZES["vocab_size"], (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model(example, ids):
    """After two steps, so that tau and bias differ from their initial values."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(example.LazyLlamaConfig(bias_reach=6, **SIZES))
    first, second = example.train(model, ids, steps=2)
    assert second < first
    return model.eval()


def lazily(model):
    """tau and bias of every layer."""
    return {name: x for name, x in model.state_dict().items() if ".lazy." in name}


def test_tau_and_bias_are_trained_and_reloaded(model, ids, tmp_path):
    for name, x in lazily(model).items():
        assert (x != (1 if name.endswith("tau") else 0)).all(), name
    model.save_pretrained(tmp_path)
    loaded, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values()), found
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.lm_head.weight.dtype == torch.bfloat16
    assert all(torch.equal(x, lazily(model)[name]) for name, x in lazily(half).items())
    assert half(ids).logits.dtype == torch.bfloat16


def test_a_llama_is_converted(example, ids, tmp_path):
    """tau and bias are initialised to 1 and 0; at tau = 0 the model equals the original Llama."""
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).double().eval()
    llama.save_pretrained(tmp_path)
    model = example.LazyLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    taus = [layer.self_attn.lazy.tau for layer in model.model.layers]
    assert all((x == (1 if name.endswith("tau") else 0)).all() for name, x in lazily(model).items())
    assert not torch.allclose(model(ids).logits, llama(ids).logits)
    for tau in taus:
        torch.nn.init.zeros_(tau)
    torch.testing.assert_close(model(ids).logits, llama(ids).logits)


def test_generating_with_a_cache_equals_the_full_pass(model, ids):
    model = model.double()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
    whole = model(found.sequences, use_cache=False).logits[:, ids.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(found.logits, 1), whole.float())  # generate casts them
    assert torch.equal(found.sequences[:, ids.shape[1] :], whole.argmax(-1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_sequences_equal_single_ones(model, ids, side):
    model, short = model.double(), ids[1:, :5]
    pad = torch.nn.functional.pad
    ends = (4, 0) if side == "left" else (0, 4)
    padded = torch.cat([ids[:1], pad(short, ends)])
    real = torch.cat([torch.ones_like(ids[:1]), pad(torch.ones_like(short), ends)])
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=real, position_ids=positions).logits
    torch.testing.assert_close(logits[:1], model(ids[:1]).logits)
    torch.testing.assert_close(logits[1, real[1] > 0], model(short).logits[0])
    if side == "left":
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        together = model.generate(padded, attention_mask=real, **options)[1, -4:]
        assert torch.equal(together, model.generate(short, **options)[0, -4:])


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"dropout": 0.1}, {"is_causal": False}])
def test_what_the_attention_cannot_do_is_refused(example, asked):
    q = torch.randn(1, 4, 3, 8)
    with pytest.raises(ValueError, match=f"lazy attention has no {next(iter(asked))}"):
        example.lazy_attention_forward(torch.nn.Module(), q, q, q, None, scaling=1.0, **asked)


def test_an_unsupported_cache_is_an_error(model, ids):
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    for call in (
        lambda: model.generate(ids, max_new_tokens=2, pad_token_id=0, cache_implementation="static"),
        lambda: model(ids, position_ids=packed, use_cache=False),
    ):
        with pytest.raises(ValueError, match="neither a static cache nor packed positions"):
            call()
