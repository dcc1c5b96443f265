"""A language model exported from lit-lazy for transformers. Needs only torch and transformers.

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True).generate(...)

Attention uses softmax, Elastic-Softmax (Lazy Attention, arXiv 2601.00919) or another rule that maps scores to weights.
If the package flash_lazy is installed, it computes these two; otherwise full score matrices are computed. tau and all
other parameters of rules and biases stay float32 when the model is cast, since bfloat16 is too coarse for them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep

try:
    from flash_lazy import lazy_attention
except ImportError:
    lazy_attention = None

NARROW = (torch.float16, torch.bfloat16)
HIDDEN = -1e30
"""Score of a hidden key, finite because -inf times 0 is NaN."""
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__annotations__ else "past_key_values"
"""What the installed transformers calls a cache: `cache` from 5.24 on."""


class LitLazyConfig(PreTrainedConfig):
    """Sizes, and the parts of attention under lit-lazy's names: {"class": "Elastic", "tau_init": 1.0, ...}."""

    model_type = "lit_lazy"
    keys_to_ignore_at_inference = (CACHE,)

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
    normaliser: dict | None = None
    bias: dict | None = None
    gate: dict | None = None
    position: dict | None = None
    attention_window: int | None = None
    full_layers: list[int] | tuple[int, ...] = ()
    """Layers, counted from 0, without the window."""
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    use_cache: bool = True


class _Float32(nn.Module):
    """A module whose float32 parameters are never cast to half precision; devices change as usual."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep_float32(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if moved.dtype in NARROW and x.dtype not in NARROW else moved

        return super()._apply(keep_float32, recurse)


# Rules map scores `[B, H, R, C]` (with two maps `[B, H, 2, R, C]`) to weights `[B, H, R, C]`. n is a row's number of
# visible keys, at least 1, and position its 1-based position, both `[B, 1, R, 1]`; visible is bool `[B, 1, R, C]`. The
# weights of hidden keys are cleared afterwards.


class _Rule(_Float32):
    maps = 1

    def __init__(self, config: LitLazyConfig, layer: int) -> None:  # noqa: ARG002
        super().__init__()
        self.settings = config.normaliser or {}
        self.context_length, self.n_heads = config.max_position_embeddings, config.num_attention_heads

    def queries(self, q: Tensor, n: Tensor) -> Tensor:  # noqa: ARG002
        return q

    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:
        raise NotImplementedError

    def output(self, out: Tensor) -> Tensor:
        return out


class _Softmax(_Rule):
    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        return s.softmax(-1)


class _Elastic(_Rule):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.threshold = self.settings["threshold"]
        shape = (self.n_heads, self.context_length) if self.threshold == "per_token" else (self.n_heads,)
        self.tau = nn.Parameter(torch.full(shape, self.settings["tau_init"], dtype=torch.float32))

    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        tau = self.tau.to(s.dtype)
        if self.threshold == "per_token":
            entry = (position[:, 0, :, 0] - 1).clamp(max=tau.shape[1] - 1)
            theta = tau[:, entry].movedim(0, 1)[..., None] / n
        else:
            theta = tau[:, None, None] / {"per_query": n, "seq_len": self.context_length, "constant": 1}[self.threshold]
        return torch.relu(s.softmax(-1) - theta)


class _Sink(_Rule):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.sink = nn.Parameter(torch.full((self.n_heads,), self.settings.get("init", 0.0)))

    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        sink = self.sink.to(s.dtype)[:, None, None]
        return s.softmax(-1) * torch.sigmoid(s.logsumexp(-1, keepdim=True) - sink)


class _ClippedSoftmax(_Rule):
    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        g = self.settings["alpha"] / (n if self.settings["length"] == "keys" else self.context_length)
        return ((1 + g) * s.softmax(-1) - g).clamp(0, 1)


class _Softpick(_Rule):
    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        top = s.amax(-1, keepdim=True).clamp(min=0)
        e = ((s - top).exp() - (-top).exp()).masked_fill(~visible, 0)
        return e.relu() / (e.abs().sum(-1, keepdim=True) + 1e-8)


class _Sigmoid(_Rule):
    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        return torch.sigmoid(s - n.log())


class _Relu(_Rule):
    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        return s.relu() / n


class _SSMax(_Softmax):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.s = nn.Parameter(torch.full((self.n_heads,), float(self.settings["init"])))

    def queries(self, q: Tensor, n: Tensor) -> Tensor:
        return (q * (self.s[:, None, None] * n.log())).to(q.dtype)


class _Differential(_Rule):
    maps = 2

    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer)
        self.vectors = nn.Parameter(torch.zeros(4, config.head_dim // 2))
        self.norm = nn.RMSNorm(config.head_dim, eps=1e-5)

    def weights(self, s: Tensor, n: Tensor, position: Tensor, visible: Tensor) -> Tensor:  # noqa: ARG002
        a1, b1, a2, b2 = self.vectors
        factor = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + self.lambda_init
        first, second = s.softmax(-1).unbind(2)
        return first - factor.to(s.dtype) * second

    def output(self, out: Tensor) -> Tensor:
        return (self.norm(out.to(self.norm.weight.dtype)) * (1 - self.lambda_init)).to(out.dtype)


RULES = {
    "Softmax": _Softmax,
    "Elastic": _Elastic,
    "OffByOne": _Sink,
    "SinkLogit": _Sink,
    "ClippedSoftmax": _ClippedSoftmax,
    "Softpick": _Softpick,
    "Sigmoid": _Sigmoid,
    "Relu": _Relu,
    "SSMax": _SSMax,
    "Differential": _Differential,
}


# Biases return the table `[H, n]` added to the scores by distance (0 beyond n), and the slopes `[H]` subtracted times
# the distance; None for an absent term.


class _NoBias(_Float32):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__()
        self.settings = config.bias or {}
        self.context_length, self.n_heads = config.max_position_embeddings, config.num_attention_heads

    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:  # noqa: ARG002
        return None, None


class _LearnedBias(_NoBias):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.table = nn.Parameter(torch.zeros(self.n_heads, self.settings["length"] or self.context_length))

    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:  # noqa: ARG002
        return self.table[:, :n_keys], None


class _Alibi(_NoBias):
    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:  # noqa: ARG002
        slopes = self.settings["slopes"] or _alibi_slopes(self.n_heads)
        return None, torch.tensor(slopes, device=device).expand(self.n_heads)


def _alibi_slopes(n_heads: int) -> list[float]:
    power = 2 ** int(math.log2(n_heads))
    slopes = [2.0 ** (-8 * h / power) for h in range(1, power + 1)]
    return slopes if power == n_heads else slopes + _alibi_slopes(2 * power)[::2][: n_heads - power]


class _T5Bias(_NoBias):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.values = nn.Parameter(torch.zeros(self.n_heads, self.settings["n_buckets"]))

    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        buckets = self.values.shape[1]
        exact, distance = buckets // 2, torch.arange(n_keys)
        position = torch.log(distance.clamp(min=1).double() / exact) / math.log(self.settings["max_distance"] / exact)
        far = (exact + (position * (buckets - exact)).long()).clamp(max=buckets - 1)
        return self.values[:, torch.where(distance < exact, distance, far).to(device)], None


class _KerpleLog(_NoBias):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.r1 = nn.Parameter(torch.ones(self.n_heads, 1))
        self.r2 = nn.Parameter(torch.full((self.n_heads, 1), 0.5))

    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        distance = torch.arange(n_keys, device=device)
        return -self.r1.clamp(min=0.01) * torch.log1p(self.r2.clamp(min=0.01) * distance), None


class _Fire(_NoBias):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.length = self.settings["length"] or self.context_length
        self.c = nn.Parameter(torch.tensor(float(self.settings["c_init"])))
        self.hidden = nn.Linear(1, self.settings["width"])
        self.out = nn.Linear(self.settings["width"], self.n_heads)

    def forward(self, n_keys: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        if n_keys > self.length:
            raise ValueError(f"FIRE supports {self.length} keys, and the text has {n_keys}; give a shorter text")
        c = self.c.abs()
        ratio = torch.log1p(c * torch.arange(n_keys, device=device, dtype=c.dtype)) / torch.log1p(c * self.length)
        return self.out(torch.relu(self.hidden(ratio[:, None]))).T.contiguous(), None


BIASES = {
    "NoBias": _NoBias,
    "LearnedBias": _LearnedBias,
    "Alibi": _Alibi,
    "T5Bias": _T5Bias,
    "KerpleLog": _KerpleLog,
    "Fire": _Fire,
}


class _Gate(nn.Module):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__()
        self.kind = (config.gate or {"class": "NoGate"})["class"]
        self.n_heads = config.num_attention_heads
        if self.kind != "NoGate":
            per = config.head_dim if (config.gate or {})["per"] == "element" else 1
            inputs = config.hidden_size if self.kind == "OutputGate" else config.num_key_value_heads * config.head_dim
            self.linear = nn.Linear(inputs, self.n_heads * per, bias=False)
            self.scale = 2.0 if (config.gate or {}).get("starts_open") else 1.0

    def forward(self, out: Tensor, x: Tensor, v: Tensor) -> Tensor:
        if self.kind == "NoGate":
            return out
        source = x if self.kind == "OutputGate" else v.transpose(1, 2).flatten(2)
        gate = self.scale * torch.sigmoid(self.linear(source))
        return out * gate.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


GATES = ("NoGate", "OutputGate", "ValueGate")


class _Position(nn.Module):
    """Positions that are added to the embeddings or rotate queries and keys."""

    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__()
        self.settings = config.position or {"class": "NoPosition"}
        if self.settings["class"] == "LearnedAbsolute":
            self.embedding = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def embed(self, x: Tensor, position: Tensor) -> Tensor:
        if self.settings["class"] != "LearnedAbsolute":
            return x
        if int(position.max()) >= self.embedding.num_embeddings:
            raise ValueError(
                f"{self.embedding.num_embeddings} positions are learned, and the text has {int(position.max()) + 1}; "
                "give a shorter text"
            )
        return x + self.embedding(position)

    def rotates(self, layer: int) -> bool:
        """Whether the rotation is applied in a layer, counted from 0."""
        every = self.settings.get("skip_every")
        return layer not in self.settings.get("skip_layers", ()) and (every is None or (layer + 1) % every > 0)

    def _scale(self, frequency: Tensor, length: int) -> Tensor:
        """The frequencies of a text of a length, in tokens."""
        scaling = self.settings.get("scaling", {"class": "NoScaling"})
        if scaling["class"] == "NoScaling":
            return frequency
        if scaling["class"] == "GivenFrequencies":
            given = (length > scaling["trained_length"] and scaling["long"]) or scaling["frequencies"]
            return torch.tensor(given, dtype=torch.float64)
        if scaling["class"] == "DynamicScaling":
            trained, pairs = scaling["trained_length"], len(frequency)
            growth = scaling["factor"] * max(length, trained) / trained - (scaling["factor"] - 1)
            return frequency * growth ** -(torch.arange(pairs, dtype=torch.float64) / max(pairs - 1, 1))
        slow = frequency / scaling["factor"]
        if scaling["class"] == "LinearScaling":
            return slow
        turns = scaling["trained_length"] * frequency / (2 * math.pi)
        kept = ((turns - scaling["low"]) / (scaling["high"] - scaling["low"])).clamp(0, 1)
        return kept * frequency + (1 - kept) * slow

    def rotation(self, position: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and signed sines `[B, 1, L, width]` of positions `[B, L]`."""
        if self.settings["class"] != "Rope":
            return None
        exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
        length = int(position.max()) + 1
        frequency = self._scale(self.settings["base"] ** -exponent, length).float().to(position.device)
        angle = position[:, None, :, None].float() * frequency
        return angle.cos().repeat(1, 1, 1, 2), torch.cat((-angle.sin(), angle.sin()), -1)


POSITIONS = ("NoPosition", "Rope", "LearnedAbsolute")
SCALINGS = ("NoScaling", "LinearScaling", "Llama3Scaling", "DynamicScaling", "GivenFrequencies")


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor] | None, maps: int) -> Tensor:
    """Rotate each map's part of D in x `[B, H, L, D]`."""
    if rotation is None:
        return x
    parts = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (maps, 2, -1))
    swapped = parts.flip(-2).flatten(-2)
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    return (parts.flatten(-2) * cos + swapped * sin).flatten(-2).to(x.dtype)


class _Attention(nn.Module):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.window = None if layer in config.full_layers else config.attention_window
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, d = self.n_heads * self.head_dim, config.hidden_size
        kv_width = self.n_kv_heads * self.head_dim
        self.q, self.k, self.v = (nn.Linear(d, out, bias=config.qkv_bias) for out in (width, kv_width, kv_width))
        self.out = nn.Linear(width, d, bias=config.out_bias)
        normaliser = config.normaliser or {"class": "Softmax"}
        self.normaliser = RULES[normaliser["class"]](config, layer)
        self.renormalise = normaliser.get("renormalise", False)
        self.bias = BIASES[(config.bias or {"class": "NoBias"})["class"]](config)
        self.gate = _Gate(config)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            map_dim = self.head_dim // self.normaliser.maps
            self.q_norm, self.k_norm = (nn.RMSNorm(map_dim, eps=config.rms_norm_eps) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        position: Tensor,
        mask: Tensor | None,
        documents: Tensor | None,
        cache: DynamicCache | None,
    ) -> Tensor:
        """x `[B, L, d]`: the newest tokens; position `[B, L]`; mask bool `[B, Lk]`, False hides a key.

        documents `[B, L]`: number of each token's document, None if a row is one.
        """
        q, k, new_v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projection in (self.q, self.k, self.v)
        )
        maps = self.normaliser.maps
        if self.qk_norm:
            q, k = (
                norm(part.unflatten(-1, (maps, -1))).flatten(-2) for part, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        q, k, v = _rotate(q, rotation, maps), _rotate(k, rotation, maps), new_v
        if cache is not None:
            past = cache.get_seq_length(self.layer)
            k, v = cache.update(k, v, self.layer)
            if k.shape[2] != past + q.shape[2]:
                raise ValueError(f"{CACHE} must be a DynamicCache without a sliding window")
        with torch.autocast(x.device.type, enabled=False):
            out = self._attend(q, k, v, position, mask, documents)
        return self.out(self.gate(out, x, new_v).transpose(1, 2).flatten(2))

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, mask: Tensor | None, documents: Tensor | None
    ) -> Tensor:
        table, slopes = self.bias(k.shape[2], q.device)
        rule = self.normaliser
        # flash_lazy counts positions from the first key, padding included.
        if lazy_attention is not None and type(rule) is _Elastic and (mask is None or rule.threshold != "per_token"):
            length = rule.context_length if rule.threshold == "seq_len" else None
            options = {"threshold": rule.threshold, "context_length": length, "renormalise": self.renormalise}
            return self._attend_fused(q, k, v, rule.tau, table, slopes, mask, documents, options)
        if lazy_attention is not None and type(rule) is _Softmax:
            tau = torch.zeros(self.n_heads, device=q.device)
            return self._attend_fused(q, k, v, tau, table, slopes, mask, documents, {})
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        rows, keys, maps = q.shape[2], k.shape[2], rule.maps
        distance = torch.arange(keys - rows, keys, device=q.device)[:, None] - torch.arange(keys, device=q.device)
        visible = (distance >= 0)[None, None]
        if self.window is not None:
            visible = visible & (distance < self.window)
        if mask is not None:
            visible = visible & mask[:, None, None]
        if documents is not None:
            visible = visible & (documents[:, None, :, None] == documents[:, None, None])
        n = visible.sum(-1, keepdim=True).clamp(min=1).to(wide)
        group = self.n_heads // self.n_kv_heads
        q = rule.queries(q, n).to(wide).unflatten(-1, (maps, -1)).movedim(3, 2)  # [B, H, maps, R, D / maps]
        k = k.to(wide).repeat_interleave(group, 1).unflatten(-1, (maps, -1)).movedim(3, 2)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if table is not None:
            width = table.shape[1]
            added = table.to(wide)[:, distance.clamp(0, width - 1)].masked_fill(distance >= width, 0)
            scores = scores + added[:, None]
        if slopes is not None:
            scores = scores - (slopes.to(wide)[:, None, None] * distance)[:, None]
        scores = scores.masked_fill(~visible[:, :, None], HIDDEN)
        if maps == 1:
            scores = scores.squeeze(2)
        w = rule.weights(scores, n, (position + 1)[:, None, :, None], visible).masked_fill(~visible, 0)
        if self.renormalise:
            mass = w.sum(-1, keepdim=True)
            w = w / torch.where(mass > 0, mass, 1)
        return rule.output((w @ v.to(wide).repeat_interleave(group, 1)).to(v.dtype))

    def _attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tau: Tensor,
        table: Tensor | None,
        slopes: Tensor | None,
        mask: Tensor | None,
        documents: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        assert lazy_attention is not None
        if documents is not None:  # all rows become one
            begins = F.pad(documents.diff() != 0, (1, 0), value=True).flatten()
            ends = F.pad(begins.nonzero()[:, 0], (0, 1), value=len(begins)).int()
            q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))
            out = lazy_attention(q, k, v, tau, table, slopes=slopes, cu_seqlens=ends, window=self.window, **options)
            return out[0].unflatten(1, documents.shape).transpose(0, 1)
        return lazy_attention(q, k, v, tau, table, slopes=slopes, key_mask=mask, window=self.window, **options)


class _SwiGLU(nn.Module):
    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Block(nn.Module):
    def __init__(self, config: LitLazyConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention = _Attention(config, layer)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = _SwiGLU(config)

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *others)
        return x + self.mlp(self.mlp_norm(x))


class LitLazyForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder. Left padding has no effect: positions and keys count only the text."""

    config_class = LitLazyConfig
    main_input_name = "input_ids"
    _no_split_modules = ["_Block"]  # noqa: RUF012 - names and types are transformers'
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["normaliser", "attention.bias"]  # noqa: RUF012

    def __init__(self, config: LitLazyConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position = _Position(config)
        self.blocks = nn.ModuleList(_Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

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
        """input_ids `[B, L]`: the newest tokens. attention_mask `[B, Lk]`: of all tokens so far, 0 for padding.

        position_ids `[B or 1, L]`: where they do not rise by 1 a document begins, as in other models of transformers,
        unless there is a mask or the cache holds tokens. labels `[B, L]`: each is the target of the previous token,
        -100 for none. logits_to_keep: number of last tokens with logits, 0 for all, or which tokens, as a tensor.
        cache: the new name of past_key_values.
        """
        if output_attentions or output_hidden_states:
            raise ValueError("output_attentions, output_hidden_states: not supported; leave them out")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache, past_key_values: are the new and the old name of one argument; give one")
        x = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        length = x.shape[1]
        if attention_mask is not None and attention_mask.shape != (x.shape[0], past + length):
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}; give [B, {past + length}], and a DynamicCache "
                f"as {CACHE}"
            )
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        documents = None
        if position_ids is not None and attention_mask is None and past == 0:
            documents = find_packed_sequence_indices(position_ids.expand(len(x), -1))
        if position_ids is None:
            counted = torch.ones(1, past + length, device=x.device) if mask is None else mask
            position_ids = (counted.cumsum(-1) - 1).clamp(min=0)[:, past:].long()
        x = self.position.embed(x, position_ids)
        width = self.config.head_dim // RULES[(self.config.normaliser or {"class": "Softmax"})["class"]].maps
        rotation = self.position.rotation(position_ids, width)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation if self.position.rotates(layer) else None, position_ids, mask, documents, cache)
        logits = self.head(slice_logits_to_keep(self.norm(x), logits_to_keep))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        found: dict[str, Any] = {"loss": loss, "logits": logits, CACHE: cache}
        output = CausalLMOutputWithPast(**found)
        return output.to_tuple() if return_dict is False else output


LitLazyConfig.register_for_auto_class()
LitLazyForCausalLM.register_for_auto_class("AutoModelForCausalLM")
