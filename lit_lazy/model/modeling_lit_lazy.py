"""A language model exported from lit-lazy for transformers. Needs only torch, transformers and the files next to it.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).generate(...)

Attention is lit-lazy's, with any rule that maps scores to weights. If the package flash_lazy is installed, its kernels
compute softmax and Elastic-Softmax (Lazy Attention, arXiv 2601.00919); `attn_implementation="eager"` computes full
matrices. tau, all other parameters of rules and biases, and constants stay float32 when the model is cast, since
bfloat16 is too coarse for them. Constants, such as RoPE's frequencies, are in model.safetensors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

from lit_lazy.attention.layer import Attention, AttentionSpec
from lit_lazy.attention.mixer import LayerShape, PassInputs
from lit_lazy.attention.normaliser import AttentionCall
from lit_lazy.attention.position import NoPosition, Position
from lit_lazy.config.serialisation import from_dict
from lit_lazy.model.decoder import SwiGLU, find_boundaries
from lit_lazy.model.export_stand_in import flash_lazy

NARROW = (torch.float16, torch.bfloat16)
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
"""What the installed transformers calls a cache: `cache` from 5.24 on."""


class LitLazyConfig(PreTrainedConfig):
    """Sizes, and attention and positions under lit-lazy's names: {"normaliser": {"class": "Elastic", ...}, ...}."""

    model_type = "lit_lazy"
    keys_to_ignore_at_inference = [CACHE]  # noqa: RUF012 - transformers adds it to a list

    vocab_size: int = 256
    hidden_size: int = 64
    intermediate_size: int = 256
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    num_key_value_heads: int = 1
    head_dim: int = 64
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 64
    """Context length of the training."""
    attention: dict | None = None
    position: dict | None = None
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True


class _LayerCache(NamedTuple):
    """A layer of transformers' cache, as lit-lazy's layers use one."""

    cache: DynamicCache
    layer: int

    def extend(self, k: Tensor, v: Tensor, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        past = self.cache.get_seq_length(self.layer)
        keys, values = self.cache.update(rotate(k), v, self.layer)
        if keys.shape[2] != past + k.shape[2]:
            raise ValueError(f"{CACHE} must be a DynamicCache without a sliding window")
        return keys, values


class _Attention(Attention):
    """lit-lazy's layer. In place of statistics it returns its weights `[B, H, L, Lk]`."""

    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        sizes = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.hidden_size
        n_layers, eps = config.num_hidden_layers, config.rms_norm_eps
        shape = LayerShape(*sizes, config.max_position_embeddings, layer, n_layers, eps)
        super().__init__(from_dict(AttentionSpec, config.attention or {}), shape, "auto")
        self.config = config

    def attend(self, call: AttentionCall) -> tuple[Tensor, Any]:
        return self.normaliser(call, self._attend_by_parts)

    def _attend_by_parts(self, call: AttentionCall) -> tuple[Tensor, Any]:
        rule, eager = self.normaliser, self.config._attn_implementation == "eager"
        weights = rule.compute_weights(call).w if call.with_stats else None
        call = call._replace(q=rule.queries(call), with_stats=False)
        fused = None if eager or flash_lazy is None else rule.fused(call)
        if eager or call.q.shape[2] == 1:  # blocks of one row save no memory, and take longer
            call = call._replace(backend="reference")
        out, _ = rule.attend_by_rule(call) if fused is None else fused.attend()
        return rule.output(out), weights


class _Block(nn.Module):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = _Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, x: Tensor, inputs: PassInputs) -> tuple[Tensor, Any]:
        mixed, weights = self.attention(self.attention_norm(x), inputs)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), weights


class LitLazyForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder. Left padding has no effect: positions and keys count only the text."""

    config_class = LitLazyConfig
    main_input_name = "input_ids"
    _no_split_modules = ["_Block"]  # noqa: RUF012 - names and types are transformers'
    _supports_sdpa = True  # the default is then not "eager"
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        blocks = [_Block(config, layer) for layer in range(config.num_hidden_layers)]
        self.blocks = nn.ModuleList(blocks)
        position: Position = NoPosition() if config.position is None else from_dict(Position, config.position)
        rotary_dim, context_length = blocks[0].attention.rotary_dim, config.max_position_embeddings
        self.position = position.build(config.hidden_size, rotary_dim, context_length)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            module._non_persistent_buffers_set.clear()  # transformers leaves what no file holds empty
            for name, x in [*module.named_parameters(recurse=False)]:
                if not x.requires_grad:  # which transformers' loading would forget
                    delattr(module, name)
                    module.register_buffer(name, x.data)
        self._keep_in_fp32_modules_strict = [*self._get_exact()]
        self.post_init()

    def _get_exact(self) -> dict[str, Tensor]:
        """Constants, and the parameters of rules and biases, by name."""
        parts = (".attention.normaliser.", ".attention.bias.")
        parameters = {name: x for name, x in self.named_parameters() if any(part in name for part in parts)}
        return parameters | dict(self.named_buffers())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        exact = {id(x) for x in self._get_exact().values()}

        def keep_exact(x: Tensor) -> Tensor:
            moved = fn(x)
            kept = id(x) in exact and moved.dtype in NARROW and x.dtype not in NARROW
            return x.to(moved.device) if kept else moved

        return super()._apply(keep_exact, recurse)

    def _require_one_rotation(self, position_ids: Tensor, is_cached: bool) -> None:
        """Raise ValueError if positions whose frequencies depend on the length need several in one pass."""
        lengths = position_ids.amax(-1) + 1
        shortest, longest = int(lengths.min()), int(lengths.max())
        if not self.position.keeps_rotation(shortest, longest):
            raise ValueError(f"input_ids: texts of {shortest} and {longest} tokens rotate otherwise; give each alone")
        if is_cached and not self.position.keeps_rotation(longest - position_ids.shape[-1], longest):
            raise ValueError(f"{CACHE}: its keys are not rotated as {longest} tokens need; give use_cache=False")

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: DynamicCache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, ...]:
        """input_ids `[B, L]`: the newest tokens. attention_mask `[B, Lk]`: of all tokens so far, 0 for outer padding.

        position_ids `[B or 1, L]`: where they do not rise by 1 a document begins, as in other models of transformers,
        unless there is a mask or the cache holds tokens. labels `[B, L]`: each is the target of the previous token,
        -100 for none. logits_to_keep: number of last tokens with logits, 0 for all, or which tokens, as a tensor.
        cache: the new name of past_key_values. output_attentions: also each layer's weights `[B, H, L, Lk]`, in memory
        for all layers at once; not with documents.
        """
        if cache is not None and past_key_values is not None:
            raise ValueError("cache, past_key_values: are the new and the old name of one argument; give one")
        with_weights = self.config.output_attentions if output_attentions is None else output_attentions
        with_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        length = x.shape[1]
        if attention_mask is not None and attention_mask.shape != (x.shape[0], past + length):
            fix = f"give [B, {past + length}], and a DynamicCache as {CACHE}"
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; {fix}")
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        if mask is not None and bool(((mask[:, 1:] > mask[:, :-1]).sum(-1) > (~mask[:, 0]).int()).any()):
            problem = "is 0 between tokens with 1, and distances and windows would count what it hides"
            raise ValueError(f"attention_mask: {problem}; give 0 only before or after a text")
        boundaries = None
        if position_ids is not None and attention_mask is None and past == 0:
            documents = find_packed_sequence_indices(position_ids.expand(len(x), -1))
            boundaries = None if documents is None else find_boundaries(F.pad(documents.diff() == 0, (1, 0)))
        if with_weights and boundaries is not None:
            raise ValueError("output_attentions: not supported with documents in position_ids; give one text a row")
        if position_ids is None:
            counted = torch.ones(1, past + length, device=x.device) if mask is None else mask
            position_ids = (counted.cumsum(-1) - 1).clamp(min=0)[:, past:].long()
        if not self.position.relative:
            self._require_one_rotation(position_ids, past > 0)
        self.position(x[:1, :1], 1, int(position_ids.max()))  # says that a text is too long, if it is
        x, turn = self.position(x, length, 0, position_ids)

        def rotate(heads: Tensor) -> Tensor:  # of blocks that may be on other devices
            return turn(heads.to(position_ids.device)).to(heads.device)

        inputs = PassInputs(rotate, None, bool(with_weights), mask, boundaries)
        hidden, attentions = [x], []
        for layer, block in enumerate(self.blocks):
            of_layer = inputs if cache is None else inputs._replace(cache=_LayerCache(cache, layer))
            x, weights = block(x, of_layer if self.position.rotates(layer) else of_layer._replace(rotate=lambda x: x))
            hidden.append(x)
            attentions.append(weights)
        hidden[-1] = x = self.norm(x)
        logits = self.head(slice_logits_to_keep(x, logits_to_keep))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        found: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: cache}
        found |= {"hidden_states": tuple(hidden)} if with_hidden else {}
        found |= {"attentions": tuple(attentions)} if with_weights else {}
        output = CausalLMOutputWithPast(**found)
        return output.to_tuple() if return_dict is False else output


LitLazyConfig.register_for_auto_class()
LitLazyForCausalLM.register_for_auto_class("AutoModelForCausalLM")
