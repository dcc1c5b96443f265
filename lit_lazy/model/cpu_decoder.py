"""A decoder's training step and forward pass as one call of flash_lazy's compiled code, for models that it knows.

Any other model, and any other way to run one, takes the model's own methods; results agree up to rounding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from flash_lazy import Stats
from flash_lazy.call import is_traced
from flash_lazy.cpu import library
from flash_lazy.cpu.decoder import ALIGNMENT, Decoder, Layer, decoder_loss, decoder_residual
from lit_lazy.attention import Attention
from lit_lazy.attention.gate import GateModule
from lit_lazy.attention.normaliser import find_lazy_threshold
from lit_lazy.model.decoder import Block, DecoderLM, SwiGLU
from lit_lazy.model.loss import head_nll, mean_nll

MOST_WEIGHTS, MOST_WORDS = 2**20, 2**14
"""Weights of a block, and words of a vocabulary, up to which the compiled code was measured to be faster on any
instruction set (docs/decisions.md)."""
OWN = {"forward", "queries", "output"}
"""Methods that a module may have been given instead of its class's."""


def compute_mean_loss(model: DecoderLM, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean loss in nats over the targets that are not `IGNORED`, with gradients: tokens and targets `[B, L]`."""
    decoder = describe(model, tokens) if torch.is_grad_enabled() else None
    if decoder is None:
        return mean_nll(head_nll(model.compute_hidden(tokens), model.head.weight, targets), targets)
    return decoder_loss(decoder, model.embed(tokens), targets)


def compute_hidden(
    model: DecoderLM, tokens: Tensor, place: Tensor | None = None, with_stats: bool = False
) -> tuple[Tensor, list[Stats]]:
    """Input of the head `[B, L, d_model]`, and each layer's `Stats` if requested."""
    residual, stats = compute_residual(model, tokens, place, with_stats)
    return model.norm(residual), stats


def compute_residual(
    model: DecoderLM, tokens: Tensor, place: Tensor | None = None, with_stats: bool = False
) -> tuple[Tensor, list[Stats]]:
    """`DecoderLM.compute_residual`, faster without gradients."""
    decoder = describe(model, tokens) if place is None and not torch.is_grad_enabled() else None
    if decoder is None:
        return model.compute_residual(tokens, place, with_stats)
    return decoder_residual(decoder, model.embed(tokens), with_stats)


def describe(model: DecoderLM, tokens: Tensor) -> Decoder | None:
    """The model as the compiled code takes it; None if that does not know the model or cannot run here."""
    if library.find_obstacle() is not None or torch.is_autocast_enabled("cpu") or is_traced([tokens]):
        return None
    batch, length = tokens.shape
    if batch < torch.get_num_threads() or length < 1 or model.checkpoint_activations or not _is_known(model):
        return None
    angles = model.position.compute_angles(length)
    layers = [_describe_layer(block, length, model.cfg.norm_eps) for block in model.blocks]  # type: ignore[arg-type]
    known = [layer for layer in layers if layer is not None]
    if angles is None or len(known) < len(layers):
        return None
    first = model.attentions[0]
    turned = angles if angles.shape[1] else None
    weights = model.norm.weight, model.head.weight
    decoder = Decoder(known, *weights, first.n_heads, first.n_kv_heads, model.cfg.norm_eps, turned)
    fits = _has_shapes(decoder, model.cfg.d_model, first.head_dim)
    return decoder if fits and all(map(_is_plain, (*decoder.tensors, model.embedding.weight))) else None


def _is_known(model: DecoderLM) -> bool:
    """Whether the model is a small decoder of known modules without hooks."""
    cfg = model.cfg
    if any(size % ALIGNMENT for size in (cfg.d_model, cfg.d_ff)) or model.head.weight.shape[0] > MOST_WORDS:
        return False
    small = sum(parameter.numel() for parameter in model.blocks[0].parameters()) <= MOST_WEIGHTS
    known = _are_linear(model.head) and _are_norms(cfg.norm_eps, model.norm)
    return small and known and not _is_changed(model.modules())


def _is_changed(modules: Iterable[nn.Module]) -> bool:
    """Whether a module, or every module, has a hook or a method of its own."""
    kinds = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    everywhere = any(getattr(global_hooks, f"_global_{kind}") for kind in kinds)
    return everywhere or any(any(getattr(m, f"_{kind}") for kind in kinds) or OWN & vars(m).keys() for m in modules)


def _are_linear(*modules: nn.Module) -> bool:
    return all(type(m) is nn.Linear and m.bias is None for m in modules)


def _are_norms(eps: float, *modules: nn.Module) -> bool:
    return all(type(m) is nn.RMSNorm and m.eps == eps and m.weight is not None for m in modules)


def _has_shapes(decoder: Decoder, d_model: int, head_dim: int) -> bool:
    """Whether all weights have the shapes that follow from the first layer's: users may have replaced some."""
    d_ff, q, kv = decoder.layers[0].gate.shape[0], decoder.n_heads * head_dim, decoder.n_kv_heads * head_dim
    norm, matrices = (d_model,), ((q, d_model), (kv, d_model), (kv, d_model), (d_model, q))
    expected = [norm, *matrices, norm, (d_ff, d_model), (d_ff, d_model), (d_model, d_ff)]
    found = [[tuple(x.shape) for x in layer.weights] for layer in decoder.layers]
    ends = tuple(decoder.norm.shape) == norm and decoder.head.shape[1] == d_model
    return d_ff % ALIGNMENT == 0 and q % ALIGNMENT == 0 and ends and all(shapes == expected for shapes in found)


def _is_plain(x: Tensor | None) -> bool:
    return x is None or (type(x) in (Tensor, nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu")


def _describe_layer(block: Block, length: int, eps: float) -> Layer | None:
    """A block of known modules; None for any other."""
    mixer, mlp = block.attention, block.mlp
    if type(block) is not Block or type(mixer) is not Attention or type(mlp) is not SwiGLU:
        return None
    linear = mixer.q, mixer.k, mixer.v, mixer.out, mlp.gate, mlp.up, mlp.down
    norms = block.attention_norm, block.mlp_norm
    if not (_are_linear(*linear) and _are_norms(eps, *norms)):
        return None
    found = find_lazy_threshold(mixer.normaliser)
    gated = type(mixer.gate) is not GateModule or mixer.qk_norm or mixer.normaliser.unit_length
    if found is None or gated or mixer.backend not in ("auto", "cpu"):
        return None
    q, k, v, out, gate, up, down = (m.weight for m in linear)
    return Layer(
        *(block.attention_norm.weight, q, k, v, out, block.mlp_norm.weight, gate, up, down),
        torch.zeros(mixer.n_heads) if found.tau is None else found.tau,
        *mixer.compute_bias(length),
        threshold=found.threshold,
        context_length=found.context_length,
        renormalise=mixer.renormalise,
        window=mixer.window,
    )
