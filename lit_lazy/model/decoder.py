"""The decoder language model: pre-norm blocks of a token mixer and SwiGLU, and their dropout."""

import hashlib
import traceback
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from flash_lazy import Stats
from lit_lazy.attention import Attention, Cache, Eviction, MixerModule, PassInputs, StreamingCache
from lit_lazy.attention.mixer import SelfInitialised
from lit_lazy.config.schema import ModelConfig
from lit_lazy.support.checked_fields import CheckedFields
from lit_lazy.support.error_messages import describe_exception, one_line


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, arXiv 2002.05202)."""

    def __init__(self, d_model: int, d_ff: int, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=bias)
        self.up = nn.Linear(d_model, d_ff, bias=bias)
        self.down = nn.Linear(d_ff, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """A mixer and SwiGLU, each with a pre-norm and a residual connection."""

    def __init__(self, cfg: ModelConfig, context_length: int, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        # Initial values and checkpoint keys depend on this name, so it is the same for all mixers.
        self.attention = cfg.build_mixer(layer, context_length)
        self.mlp_norm = nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.mlp = SwiGLU(cfg.d_model, cfg.d_ff, cfg.mlp_bias)
        self.layer, self.residual_dropout = layer, cfg.residual_dropout

    def forward(self, x: Tensor, inputs: PassInputs) -> tuple[Tensor, Stats | None]:
        """Update the residual stream x `[B, L, d_model]`; also returns attention's stats if requested."""
        mixed, stats = self.attention(self.attention_norm(x), inputs)
        x = x + self._apply_dropout(mixed, inputs.dropout_keys, 0)
        return x + self._apply_dropout(self.mlp(self.mlp_norm(x)), inputs.dropout_keys, 1), stats

    def _apply_dropout(self, added: Tensor, keys: Tensor | None, part: int) -> Tensor:
        drops = keys is not None and self.residual_dropout > 0
        return apply_dropout(added, self.residual_dropout, keys, 2 * self.layer + part) if drops else added


class DecoderLM(nn.Module):
    """Decoder-only language model, whose initial weights depend only on (seed, parameter name).

    Two variants with the same seed therefore start bit-identical in every parameter they share.
    """

    def __init__(self, cfg: ModelConfig, vocab_size: int, context_length: int, seed: int | None) -> None:
        """seed: None skips the initialisation, for weights that are loaded or never used."""
        super().__init__()
        self.cfg, self.context_length = cfg, context_length
        self.checkpoint_activations = False
        self.embedding = nn.Embedding(vocab_size, cfg.d_model)
        blocks = [Block(cfg, context_length, layer) for layer in range(cfg.n_layers)]
        self.position = cfg.position.build(cfg.d_model, blocks[0].attention.rotary_dim, context_length)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(cfg.d_model, eps=cfg.norm_eps)
        self.head = nn.Linear(cfg.d_model, vocab_size, bias=False)
        if cfg.tie_embeddings:
            self.head.weight = self.embedding.weight
        if seed is not None:
            init_parameters(self, seed)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.norm.weight.device

    @property
    def attentions(self) -> list[Attention]:
        """The attention layers in order; empty with another mixer."""
        return [mixer for mixer in self.mixers if mixer.attends]  # type: ignore[misc]

    @property
    def mixers(self) -> list[MixerModule]:
        """The mixers of the layers in order."""
        return [block.attention for block in self.blocks]  # type: ignore[union-attr]

    def new_cache(self, eviction: Eviction | None = None) -> list[Cache]:
        """Create an empty cache to pass to every call of decoding; with `eviction` a streaming cache.

        Eviction raises ValueError for learned positions, which cannot change when tokens move in the cache, and for
        mixers with a state in place of keys.
        """
        if eviction is None:
            return [mixer.new_cache() for mixer in self.mixers]
        mixer, position = type(self.cfg.mixer).__name__, type(self.cfg.position).__name__
        if not self.attentions:
            fix = "leave eviction out"
            raise ValueError(f"model.mixer={mixer}: keeps a state, not keys that could be evicted; {fix}")
        if not self.position.relative:
            problem = "a cache that evicts moves tokens to other positions, which it does not support"
            fix = "use NoPosition or a Rope that no length changes, or no eviction"
            raise ValueError(f"model.position={position}: {problem}; {fix}")
        return [StreamingCache(eviction) for _ in self.blocks]

    def check_length(self, length: int) -> None:
        """Raises a one-line ValueError if positions or bias do not support `length` tokens."""
        token = torch.zeros(1, 1, self.embedding.embedding_dim, device=self.device)
        try:
            self.position.embed(token.expand(1, length, -1), 0)
            for attention in self.attentions:
                attention.compute_bias(length)
        except RuntimeError as error:  # incompatible shapes, or out of memory
            raise ValueError(one_line(error)) from None

    def forward(
        self,
        tokens: Tensor,
        cache: Sequence[Cache] | None = None,
        key_mask: Tensor | None = None,
        last_only: bool = False,
        place: Tensor | None = None,
    ) -> Tensor:
        """Logits `[B, L, vocab]` of tokens `[B, L]`; with a cache the tokens continue the cached ones.

        key_mask: bool `[B, Lk]`, False hides a key from every query of every layer. last_only: return only the last
        token's logits, `[B, 1, vocab]`, since those of a long prompt may not fit in memory. place: int64 `[B, L]`,
        0-based position of each token in its document, to which attention is then restricted; without cache and
        key_mask.
        """
        x = self.norm(self.compute_residual(tokens, place, cache=cache, key_mask=key_mask)[0])
        return self.head(x[:, -1:] if last_only else x)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings `[B, L, d_model]` of tokens from the first position on, the input of the first block."""
        return self.position.embed(self.embedding(tokens), 0)

    def compute_hidden(self, tokens: Tensor, place: Tensor | None = None, dropout_keys: Tensor | None = None) -> Tensor:
        """Input of the head, `[B, L, d_model]`, for a loss that never holds all logits (`head_nll`).

        dropout_keys: int64 `[B]`, seeds of each sequence's dropout in training (`sequence_keys`); None for no dropout.
        """
        return self.norm(self.compute_residual(tokens, place, dropout_keys=dropout_keys)[0])

    def compute_residual(
        self,
        tokens: Tensor,
        place: Tensor | None = None,
        with_stats: bool = False,
        cache: Sequence[Cache] | None = None,
        key_mask: Tensor | None = None,
        dropout_keys: Tensor | None = None,
    ) -> tuple[Tensor, list[Stats]]:
        """Residual stream after the last block `[B, L, d_model]`, and each layer's `Stats` `[B, H, L]` if requested."""
        span, offset = cache[0].span(tokens.shape[1]) if cache else (tokens.shape[1], 0)
        places = () if place is None else (place,)
        x, rotate = self.position(self.embedding(tokens), span, offset, *places)
        cu_seqlens = None if place is None else find_boundaries(place)
        inputs = PassInputs(rotate, None, with_stats, key_mask, cu_seqlens, dropout_keys)
        collected: list[Stats] = []
        for index, block in enumerate(self.blocks):
            layer_inputs = inputs._replace(cache=cache[index]) if cache else inputs
            if not self.position.rotates(index):
                layer_inputs = layer_inputs._replace(rotate=lambda heads: heads)
            if self.checkpoint_activations and torch.is_grad_enabled():
                # A block draws from no generator.
                x, stats = checkpoint(block, x, layer_inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, stats = block(x, layer_inputs)
            if stats is not None:
                collected.append(stats)
        return x, collected


def build_empty(cfg: ModelConfig, vocab_size: int, context_length: int) -> DecoderLM:
    """A model without memory for its weights. Raises a one-line ValueError that names a class which prevents that."""
    try:
        with torch.device("meta"):
            model = DecoderLM(cfg, vocab_size, context_length, seed=None)
    except ValueError:
        raise
    except Exception as error:  # of a user's class, such as that a tensor has no value yet
        builders = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        name = [type(x).__name__ for x in builders if isinstance(x, nn.Module | CheckedFields)][-1]
        problem = f"{name}: cannot be built on the meta device ({describe_exception(error)})"
        raise ValueError(f"{problem}; use numbers, or tensors with device='cpu'") from error
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers") and any(getattr(x, "is_meta", 0) for x in tree_leaves(value)):
                problem = "is a tensor that is neither a parameter nor a buffer"
                raise ValueError(f"{type(module).__name__}.{name}: {problem}; use register_buffer")
    return model


def find_boundaries(place: Tensor) -> Tensor:
    """Boundaries of the documents in the concatenated sequences, from 0 to B * L: int32 `[n + 1]`.

    place: int64 `[B, L]`, 0 at the first token of every document and every sequence.
    """
    starts = (place.flatten() == 0).nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([place.numel()]))).int()


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """Generator of one parameter's initial value."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def init_parameters(model: DecoderLM, seed: int) -> None:
    """Initialise weight matrices and token embeddings from N(0, init_std^2), or the latter's embedding_init_std.

    `SelfInitialised` modules initialise themselves; biases of other linear layers are 0; norms and tau keep their
    constants.
    """
    for path, module in model.named_modules():
        if isinstance(module, SelfInitialised):
            module.init_parameters(lambda name, path=path: parameter_generator(seed, f"{path}.{name}"))
    embedding_std = model.cfg.init_std if model.cfg.embedding_init_std is None else model.cfg.embedding_init_std
    drawn: set[int] = set()
    for path, module in _matrices(model):
        if id(module.weight) not in drawn and not isinstance(module, SelfInitialised):
            drawn.add(id(module.weight))
            std = embedding_std if module is model.embedding else model.cfg.init_std
            nn.init.normal_(module.weight, std=std, generator=parameter_generator(seed, f"{path}.weight"))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """Linear layers and embeddings by path, except those within `SelfInitialised` modules."""
    parts = [part for part in model.modules() if isinstance(part, SelfInitialised)]
    inside = {id(m) for part in parts for m in part.modules() if m is not part}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and id(module) not in inside:
            yield path, module


def flops_per_token(model: DecoderLM, context_length: int) -> int:
    """Training FLOPs per token: 6 per weight of a linear layer, 4 if it is not trained, plus those of the mixers.

    For attention these are its two causal products, half of the full square (Chowdhery et al., arXiv 2204.02311,
    appendix B), forward and backward. Windows, recomputed products and positional biases are not counted.
    """
    linear = [m.weight for _, m in _matrices(model) if isinstance(m, nn.Linear)]
    weights = sum((6 if weight.requires_grad else 4) * weight.numel() for weight in linear)
    return weights + sum(mixer.flops_per_token(context_length) for mixer in model.mixers)


GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""Increment of SplitMix64 (Steele, Lea and Flood 2014), as a signed 64-bit integer."""
ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))


def sequence_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """Seeds of the sequences' masks, int64 in the shape of `rows`, their int64 indices in the batch."""
    return _splitmix64(_splitmix64(_splitmix64(torch.full_like(rows, seed)) + step) + rows)


def apply_dropout(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    """Zero a share p of the elements of x `[B, L, d]` and divide the others by 1 - p.

    keys: `[B]` from `sequence_keys`. site: index of the dropout layer in the model.
    """
    numbers = torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])
    drawn = _splitmix64(_splitmix64(keys + site)[:, None, None] + GOLDEN * numbers)
    return x.masked_fill(drawn < round(p * 2**64) - 2**63, 0) / (1 - p)


def _splitmix64(x: Tensor) -> Tensor:
    """SplitMix64's output function, on int64."""
    x = x + GOLDEN
    for shift, factor in ROUNDS:
        x = (x ^ _shift_right(x, shift)) * factor
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical right shift."""
    return (x >> by) & (2 ** (64 - by) - 1)


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one. A collective: all devices must call it."""
    from torch.distributed.tensor import DTensor  # late: it takes time that a model on one device can save

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
