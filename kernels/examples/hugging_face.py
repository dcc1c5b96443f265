"""Lazy Attention in a Hugging Face model: a Llama whose tau and bias are trained, saved, loaded and used to generate.

    python kernels/examples/hugging_face.py      # needs transformers; downloads nothing

Padding on either side and a growing cache work as usual. Exclude tau and bias from weight decay.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    initialization,
)
from transformers.masking_utils import causal_mask_function

from flash_lazy import lazy_attention


def lazy_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: query `[B, H, Lq, D]`, key and value `[B, Hkv, Lk, D]`, mask `[B, Lk]`."""
    wrong = [name for name in ("softcap", "s_aux", "sliding_window") if others.get(name) is not None]
    wrong += ["dropout"] * (dropout > 0) + ["is_causal=False"] * (is_causal is False)
    if wrong:
        raise ValueError(f"lazy attention has no {', '.join(wrong)}; set it to none in the model's config")
    out = lazy_attention(query, key, value, module.lazy.tau, module.lazy.bias, key_mask=mask, scale=scaling)
    return out.transpose(1, 2), None


def make_padding_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    mask_function: Callable[..., Tensor] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """Mask of the keys that are not padding, bool `[B, Lk]`. Without this function, padding would be ignored."""
    if mask_function is not causal_mask_function or q_offset + q_length != kv_length:
        raise ValueError("lazy attention supports neither a static cache nor packed positions; use padded batches")
    return None if attention_mask is None or attention_mask.all() else attention_mask.bool()


AttentionInterface.register("lazy", lazy_attention_forward)
AttentionMaskInterface.register("lazy", make_padding_mask)


class LazyLlamaConfig(LlamaConfig):
    model_type = "lazy_llama"
    bias_reach: int = 512


class LazyParameters(nn.Module):
    """Separate module, so that `_init_weights` can initialise tau and bias if a checkpoint lacks them."""

    def __init__(self, heads: int, reach: int) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.ones(heads))
        self.bias = nn.Parameter(torch.zeros(heads, reach))


class LazyLlamaModel(LlamaModel):
    _keep_in_fp32_modules_strict = ("lazy",)  # otherwise dtype=torch.bfloat16 would also cast tau and bias

    def __init__(self, config: LazyLlamaConfig) -> None:
        super().__init__(config)
        for layer in self.layers:
            layer.self_attn.lazy = LazyParameters(config.num_attention_heads, config.bias_reach)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LazyParameters):
            initialization.ones_(module.tau)
            initialization.zeros_(module.bias)


class LazyLlamaForCausalLM(LlamaForCausalLM):
    config_class = LazyLlamaConfig

    def __init__(self, config: LazyLlamaConfig) -> None:
        super().__init__(config)
        self.model = LazyLlamaModel(config)
        self.set_attn_implementation("lazy")
        self.post_init()


AutoConfig.register(LazyLlamaConfig.model_type, LazyLlamaConfig)
AutoModelForCausalLM.register(LazyLlamaConfig, LazyLlamaForCausalLM)


def train(model: PreTrainedModel, ids: Tensor, steps: int) -> list[float]:
    """Losses of `steps` training steps on one batch."""
    lazy = [x for name, x in model.named_parameters() if ".lazy." in name]
    others = [x for name, x in model.named_parameters() if ".lazy." not in name]
    optimiser = torch.optim.AdamW([{"params": others}, {"params": lazy, "weight_decay": 0.0}], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LazyLlamaConfig(vocab_size=100, num_key_value_heads=2, **sizes))
    ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(0))
    print("losses", train(model, ids, steps=2))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    print("tau", loaded.model.layers[0].self_attn.lazy.tau)
    print("generated", loaded.generate(ids[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0))
