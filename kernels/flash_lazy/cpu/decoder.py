"""A small decoder's whole training step, and its forward pass, in C++: activations stay in the processor's cache.

Blocks of RMSNorm, Lazy Attention and SwiGLU with residual connections, then a last norm and a head with cross-entropy.
The step computes the gradients together with the loss, so that no activation is saved.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..call import THRESHOLDS, Stats, Threshold
from . import library

ALIGNMENT = 16
"""d_model, d_ff and heads * head_dim are multiples of it: the widest vector."""


@dataclass(frozen=True)
class Layer:
    """Weights of a block as `torch.nn.Linear` has them, `[out, in]`, and its attention as in `lazy_attention`."""

    attention_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    tau: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    threshold: Threshold = "per_query"
    context_length: int | None = None
    renormalise: bool = False
    window: int | None = None

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Norms and matrices, in the order of `Weight` in decoder.cpp."""
        return self.attention_norm, self.q, self.k, self.v, self.out, self.mlp_norm, self.gate, self.up, self.down

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of `Weight` in decoder.cpp."""
        return *self.weights, self.tau, self.bias, self.slopes


@dataclass(frozen=True)
class Decoder:
    """All weights, float32 on the CPU, and the settings that layers share.

    angles: by which the dimensions (m, m + D / 2) of queries and keys are turned, `[L, D / 2]`; None for no rotation.
    """

    layers: Sequence[Layer]
    norm: Tensor
    head: Tensor
    n_heads: int
    n_kv_heads: int
    eps: float
    angles: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor | None]:
        """All weights, layer by layer, then the last norm and the head."""
        return [*(x for layer in self.layers for x in layer.tensors), self.norm, self.head]


class _LayerFields(ctypes.Structure):
    """`LayerSettings` of decoder.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tau_columns", "reach", "window", "context_length")),
        *((name, ctypes.c_int32) for name in ("threshold", "renormalise")),
    ]


_SIZES = ("layers", "batch", "length", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "vocabulary", "threads")


class _DecoderFields(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in ("settings", "weights", "cosine", "sine", "x")),
        ("eps", ctypes.c_float),
    ]


def decoder_loss(decoder: Decoder, x: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats over the targets that are at least 0, with gradients of x and all weights.

    x: embeddings `[B, L, d_model]`, float32. targets: whole numbers `[B, L]`; negative ones are not counted. Raises
    ValueError for targets of another shape, IndexError for one beyond the vocabulary.
    """
    if targets.shape != x.shape[:2]:
        raise ValueError(f"targets has shape {list(targets.shape)}; give {list(x.shape[:2])}, one for each token")
    words, largest = decoder.head.shape[0], int(targets.max())
    if largest >= words:
        raise IndexError(f"targets has {largest}; the vocabulary has {words} words")
    return _StepFunction.apply(decoder, targets, x, *decoder.tensors)


@torch.no_grad()
def decoder_residual(decoder: Decoder, x: Tensor, with_stats: bool = False) -> tuple[Tensor, list[Stats]]:
    """Residual stream after the last block `[B, L, d_model]` and, if requested, each layer's `Stats`; no gradients."""
    x = x.contiguous()
    record, alive = _describe(decoder, x, decoder.tensors)
    residual = torch.empty_like(x)
    shape = len(decoder.layers), len(Stats._fields), x.shape[0], decoder.n_heads, x.shape[1]
    stats = x.new_empty(shape) if with_stats else None
    address = None if stats is None else stats.data_ptr()
    library.load().flash_lazy_decoder_forward(ctypes.byref(record), residual.data_ptr(), address)
    del alive
    return residual, [] if stats is None else [Stats(*layer) for layer in stats]


class _StepFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decoder: Decoder, targets: Tensor, x: Tensor, *weights: Tensor | None) -> Tensor:
        x, targets = x.contiguous(), targets.to(torch.int64).contiguous()
        record, alive = _describe(decoder, x, weights)
        dx = torch.empty_like(x)
        wanted = [w if w is not None and w.requires_grad else None for w in weights]
        gradients = [None if w is None else torch.empty_like(w, memory_format=torch.contiguous_format) for w in wanted]
        loss = library.load().flash_lazy_decoder_step(
            ctypes.byref(record), targets.data_ptr(), dx.data_ptr(), _addresses(gradients)
        )
        del alive
        ctx.gradients = [dx, *gradients]
        return x.new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # its gradients are not functions of anything that it keeps
            raise NotImplementedError("a compiled step has no second derivatives; leave create_graph out")
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("the gradients of a compiled step were already used; call it again")
        (grad,) = grad_outputs
        if grad.item() != 1:
            gradients = [None if x is None else x.mul_(grad) for x in gradients]
        return None, None, *gradients


def _describe(decoder: Decoder, x: Tensor, weights: Sequence[Tensor | None]) -> tuple[_DecoderFields, Any]:
    """The decoder as the library takes it, and what must stay alive as long."""
    weights = [None if w is None else w.contiguous() for w in weights]
    settings = (_LayerFields * len(decoder.layers))(
        *(
            _LayerFields(
                layer.tau.shape[1] if layer.tau.dim() == 2 else 1,
                0 if layer.bias is None else layer.bias.shape[1],
                *(layer.window or 0, layer.context_length or 1),
                *(THRESHOLDS.index(layer.threshold), layer.renormalise),
            )
            for layer in decoder.layers
        )
    )
    turns = None if decoder.angles is None else (decoder.angles.cos(), decoder.angles.sin())
    addresses, first = _addresses(weights), decoder.layers[0]
    record = _DecoderFields(
        *(len(decoder.layers), *x.shape, first.gate.shape[0], decoder.n_heads, decoder.n_kv_heads),
        *(first.q.shape[0] // decoder.n_heads, decoder.head.shape[0], torch.get_num_threads()),
        *(ctypes.addressof(settings), ctypes.addressof(addresses)),
        *((None, None) if turns is None else (part.data_ptr() for part in turns)),
        *(x.data_ptr(), decoder.eps),
    )
    return record, (weights, settings, addresses, turns)


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*(None if x is None else x.data_ptr() for x in tensors))
