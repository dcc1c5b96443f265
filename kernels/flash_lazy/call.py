"""Shared by the backends: the arguments of a call, their checks, dtype rules, and the returned records."""

import functools
import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

F = TypeVar("F", bound=Callable[..., Any])
Backend = Literal["auto", "reference", "chunked", "cpu", "triton"]
Threshold = Literal["per_query", "seq_len", "per_token", "constant"]
BACKENDS, THRESHOLDS = get_args(Backend), get_args(Threshold)  # cpu/attention.h has THRESHOLDS in this order

OPERATORS = __name__.rpartition(".")[0] + "::"
"""Beginning of the operators' names: the package's, so that a process can hold a second copy under another one."""
LONGEST_VALUE = 80
"""Characters of a value in a message."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_EAGER = (DispatchKeySet(DispatchKey.BackendSelect) | DispatchKeySet(DispatchKey.ADInplaceOrView)).raw_repr()
"""Keys that the dispatcher includes in every call."""
_PLAIN = {Tensor, torch.nn.Parameter, type(None)}

REQUIRED, LEAVES, TENSORS = 4, 6, 10
"""The first TENSORS fields of a `Call` are tensors or None, the first LEAVES may get gradients, REQUIRED are given."""


class Call(NamedTuple):
    """The arguments of one call, as documented in `flash_lazy.lazy_attention`.

    cu_seqlens_k: document boundaries of the keys; cu_seqlens then holds those of the queries only.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tau: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None
    cu_seqlens: Tensor | None = None
    kv_lengths: Tensor | None = None
    key_mask: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    threshold: Threshold = "per_query"
    context_length: int | None = None
    renormalise: bool = False
    scale: float | None = None
    window: int | None = None

    @property
    def factor(self) -> float:
        """Factor of the scores: scale, or its default."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else float(self.scale)


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    Threshold: "str",
    bool: "bool",
    int | None: "SymInt?",
    float | None: "float?",
}
CALL_SCHEMA = ", ".join(f"{_SCHEMA_TYPES[kind]} {name}" for name, kind in get_type_hints(Call).items())
"""Operator schema of the fields of a `Call`, which are the first arguments of every operator."""


class Stats(NamedTuple):
    """Statistics of the rows of the weight matrix, each `[B, H, Lq]`, float32 (float64 for float64 inputs).

    lse: log-sum-exp of the visible scores, bias included (-inf for a row that sees no key). The only field that carries
        gradients.
    mass: sum of the row's weights before renormalising.
    first_weight: weight of the value of the document's first key, after renormalising if enabled; 0 if that key is
        hidden or outside the window.
    zeros: number of visible keys with p <= theta.
    """

    lse: Tensor
    mass: Tensor
    first_weight: Tensor
    zeros: Tensor


class Weights(NamedTuple):
    """The weight matrix of some rows, in `compute_dtype`.

    scores: `[B, H, Lq, Lk]`, scaled, bias included, -inf at hidden keys.
    p: softmax of the scores, 0 at hidden keys and in a row that sees no key.
    theta: threshold of each row, broadcast to `[B, H, Lq]`.
    w: weights of the values, `[B, H, Lq, Lk]`: max(p - theta, 0), divided by the mass if renormalised.
    mass: sum of a row's weights before renormalising, `[B, H, Lq]`.
    visible: bool `[B, 1, Lq, Lk]`.
    """

    scores: Tensor
    p: Tensor
    theta: Tensor
    w: Tensor
    mass: Tensor
    visible: Tensor


def mark_constant(function: F) -> F:
    """Let torch.compile take a function's result for a constant.

    As torch.compiler.assume_constant_result does, which imports the compiler: a second that eager users need not wait.
    """
    function._dynamo_marked_constant = True  # pyrefly: ignore [missing-attribute]
    return function


def compute_dtype(q: Tensor) -> torch.dtype:
    """Dtype of scores, softmax and threshold: float64 for float64 inputs, float32 otherwise."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def slice_documents(call: Call) -> list[tuple[slice, slice]]:
    """Slices of the rows and keys of each document, read from the boundaries; one pair of full slices without them."""
    if call.cu_seqlens is None:
        return [(slice(0, call.q.shape[2]), slice(0, call.k.shape[2]))]
    rows = [slice(*ends) for ends in pairwise(call.cu_seqlens.tolist())]
    if call.cu_seqlens_k is None:
        return [(part, part) for part in rows]
    return list(zip(rows, (slice(*ends) for ends in pairwise(call.cu_seqlens_k.tolist())), strict=True))


def rows_in_documents(call: Call, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the key at each row's position, and of its document's first key, `[1, Lq]`, without a device sync."""
    row = torch.arange(call.q.shape[2], device=call.q.device)[None]
    ends = cu_seqlens.long()
    document = torch.searchsorted(ends, row, right=True) - 1
    if call.cu_seqlens_k is None:
        return row, ends[document]
    key_ends = call.cu_seqlens_k.long()
    return row + (key_ends - ends)[document + 1], key_ends[document]


def tau_divisor(call: Call, n: Tensor) -> Tensor:
    """Divisor of tau in the threshold of rows that see n keys; in n's shape and dtype."""
    if call.context_length is not None:  # only with threshold "seq_len"
        return torch.full_like(n, call.context_length)
    return torch.ones_like(n) if call.threshold == "constant" else n.clamp(min=1)


def tau_gradient(survivors: Tensor, entry: Tensor | None, tau: Tensor) -> Tensor:
    """Gradient of tau from sum_j m_ij dp_ij over the rows' divisor of tau, `[B, H, Lq]`.

    entry `[B or 1, Lq]` is the column of tau that each row reads under threshold "per_token".
    """
    if entry is None:
        return -survivors.sum((0, 2), dtype=torch.float64).to(tau.dtype)
    per_row = -survivors.double().transpose(1, 2)  # [B, Lq, H]
    if entry.shape[0] == 1:
        per_row = per_row.sum(0, keepdim=True)
    # On several CPU threads index_put_ adds float32 in no fixed order, but float64 sequentially.
    total = torch.zeros(tau.shape[1], tau.shape[0], dtype=torch.float64, device=tau.device)
    return total.index_put_((entry,), per_row, accumulate=True).T.to(tau.dtype).contiguous()


def is_traced(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a call is compiled, recorded, transformed or of tensors without values, all of which see only operators.

    Tracers, modes and transforms are keys of torch's dispatcher in this thread; fake tensors have a class of their own.
    """
    if torch.compiler.is_compiling() or torch._C._dispatch_tls_local_include_set().raw_repr() & ~_EAGER:
        return True
    return not _PLAIN.issuperset(map(type, tensors))


def is_autocast_enabled(q: Tensor) -> bool:
    """Whether autocast applies on the device of q; never on meta, which torch's own function does not know."""
    return not q.is_meta and torch.is_autocast_enabled(q.device.type)


def cast_for_autocast(call: Call) -> Call:
    """Cast q, k and v to autocast's dtype if it is enabled, as torch's own attention does."""
    if not is_autocast_enabled(call.q) or call.q.dtype == torch.float64:
        return call
    q, k, v = (x.to(torch.get_autocast_dtype(call.q.device.type)) for x in call[:3])
    return call._replace(q=q, k=k, v=v)


def check_types(call: Call) -> None:
    """Raises TypeError, naming the argument, if a tensor argument is not a dense tensor."""
    for index, x in enumerate(call[:TENSORS]):
        if x is not None or index < REQUIRED:
            check_type(call._fields[index], x)


def check_type(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type_name(x)}; give a tensor")
    if x.is_nested or x.layout != torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {kind} tensor; give a dense one")


def require_values(q: Tensor) -> None:
    """Raises TypeError for a tensor on meta."""
    if isinstance(q, Tensor) and q.is_meta:
        raise TypeError("q is on meta, where tensors have no values; move q, k and v to a device")


def type_name(x: object) -> str:
    """Name of a value's type in messages, which may not hold a value as long as an array's."""
    kind = type(x)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def show(value: object) -> str:
    """A value in a one-line message, cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}..."


def refuse_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    """The jvp of a backend that has none. torch's own error names no way out."""
    raise NotImplementedError("this backend has no forward mode (jvp, hessian); choose backend='reference'")


class _SecondDerivative(torch.autograd.Function):
    """Passes gradients on; the other arguments are what they depend on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, ...]:
        raise NotImplementedError("this backend has no second derivatives; choose backend='reference'")


def differentiate_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """A Function's `backward` whose gradients raise NotImplementedError when they are differentiated.

    backward: takes the saved tensors after ctx; activation checkpointing refuses a second reading.
    Under torch's `once_differentiable` they are constants to `torch.autograd.grad`: a Hessian is 0 without an error.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return found
        present = [x for x in found if x is not None]
        causes = [x for x in (*saved, *grads) if x is not None]
        tied = iter(_SecondDerivative.apply(len(present), *present, *causes))
        return tuple(None if x is None else next(tied) for x in found)

    return run


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {show(value)}; give True or False")


def check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:  # an array has no single truth value
        raise ValueError(f"{name} is {show(value)}; choose one of {', '.join(known)}")


def prepare(call: Call) -> Call:
    """Check a call and cast it for autocast. Raises TypeError or ValueError if an argument is invalid."""
    check_types(call)
    call = cast_for_autocast(call)
    check(call)
    return call


def check(call: Call) -> None:
    """Raises ValueError, naming the argument, its value and the fix, if an argument is invalid."""
    _check_tensors(call)
    _check_threshold(call)
    _check_head_parameters(call)
    _check_visibility(call)
    check_flag("renormalise", call.renormalise)
    scale, need = call.scale, "give a finite number, or None for 1 / sqrt(D)"
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise ValueError(f"scale is a {type(scale).__name__}, which gets no gradient; {need}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is {scale}; {need}")


def _check_tensors(call: Call) -> None:
    q, k, v = call.q, call.k, call.v
    if q.dtype not in _DTYPES:
        raise ValueError(f"q is {q.dtype}; give float16, bfloat16, float32 or float64")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(f"{name} has shape {_shape(x)}; give [B, H, L, D] with every size at least 1")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}; cast them to one dtype")
        _check_device(name, x, q)
    if k.shape != v.shape:
        raise ValueError(f"v has shape {_shape(v)} and k {_shape(k)}; give both [B, Hkv, Lk, D]")
    (batch, heads, rows, width), (kv_batch, kv_heads, keys, kv_width) = q.shape, k.shape
    if kv_batch != batch or kv_width != width:
        raise ValueError(f"k has shape {_shape(k)} and q {_shape(q)}; B and D must agree")
    if heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads and q {heads}; q's must be a multiple of k's")
    if rows > keys:
        layout = "[batch, heads, length, head dim]" if call.cu_seqlens_k is None else "[total, heads, head dim]"
        raise ValueError(
            f"q has {rows} rows and k {keys}; queries end where keys end, so give Lq <= Lk; tensors are {layout}"
        )


def _check_threshold(call: Call) -> None:
    threshold, context_length = call.threshold, call.context_length
    check_choice("threshold", threshold, THRESHOLDS)
    if threshold == "seq_len" and not _is_count(context_length):
        need = "threshold='seq_len' needs the training context, a whole number >= 1"
        raise ValueError(f"context_length is {show(context_length)}; {need}")
    if threshold != "seq_len" and context_length is not None:
        raise ValueError(f"context_length is {show(context_length)}; only threshold='seq_len' uses it, so leave it out")


def _check_head_parameters(call: Call) -> None:
    q, heads = call.q, call.q.shape[1]
    layouts = ("[H, N]" if call.threshold == "per_token" else "[H]"), "[H, W]", "[H]"
    for name, x, layout in zip(("tau", "bias", "slopes"), (call.tau, call.bias, call.slopes), layouts, strict=True):
        if x is None:
            continue
        if x.dim() != (1 if layout == "[H]" else 2) or x.shape[0] != heads or 0 in x.shape:
            condition = f"with threshold={call.threshold!r} " if name == "tau" else ""
            raise ValueError(f"{name} has shape {_shape(x)}; {condition}give {layout}, H = {heads}")
        if x.dtype != torch.float32 and not x.dtype == q.dtype == torch.float64:
            raise ValueError(f"{name} is {x.dtype}; keep it float32 (float64 is allowed with float64 q)")
        if x.numel() >= 2**31:
            raise ValueError(
                f"{name} has shape {_shape(x)}; give fewer than 2**31 entries, which kernels index with 32 bits"
            )
        _check_device(name, x, q)


def _is_count(x: object) -> bool:
    """Whether x is an int from 1 to the largest int64."""
    return isinstance(x, int) and not isinstance(x, bool) and 1 <= x < 2**63


def _check_visibility(call: Call) -> None:
    for name in ("cu_seqlens", "cu_seqlens_k", "kv_lengths", "key_mask"):
        _check_device(name, getattr(call, name), call.q)
    if call.cu_seqlens is not None:
        _check_documents(call, call.cu_seqlens)
    if call.kv_lengths is not None:
        _check_lengths(call.kv_lengths, call.q, call.k)
    batch, keys, key_mask, window = call.k.shape[0], call.k.shape[2], call.key_mask, call.window
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, keys)):
        got = f"{key_mask.dtype} of shape {_shape(key_mask)}"
        raise ValueError(f"key_mask is {got}; give bool [B, Lk] = [{batch}, {keys}], True for visible keys")
    if window is not None and not _is_count(window):
        need = "a whole number, at least 1 (the query's own key)"
        raise ValueError(f"window is {show(window)}; give {need}, or None for no window")


def _check_documents(call: Call, cu_seqlens: Tensor) -> None:
    q, k, rows, keys = call.q, call.k, call.q.shape[2], call.k.shape[2]
    if call.kv_lengths is not None:
        raise ValueError("kv_lengths and cu_seqlens are both given; packed documents need only cu_seqlens")
    if call.cu_seqlens_k is not None:
        _check_boundaries("cu_seqlens_q", cu_seqlens, f"total_q = {rows}", rows)
        _check_boundaries("cu_seqlens_k", call.cu_seqlens_k, f"total_k = {keys}", keys)
        _check_pairs(cu_seqlens, call.cu_seqlens_k)
    elif k.shape[0] != 1 or rows != keys:
        raise ValueError(f"cu_seqlens needs B = 1 and Lq = Lk; q has shape {_shape(q)} and k {_shape(k)}")
    else:
        _check_boundaries("cu_seqlens", cu_seqlens, f"Lk = {keys}", keys)


def _check_boundaries(name: str, x: Tensor, last: str, total: int) -> None:
    if x.dtype != torch.int32 or x.dim() != 1:
        raise ValueError(f"{name} is {x.dtype} of shape {_shape(x)}; give int32 [n + 1]")
    if _can_read(x):
        cuts = x.tolist()
        if len(cuts) < 2 or cuts[0] != 0 or cuts[-1] != total or cuts != sorted(cuts):
            raise ValueError(f"{name} is {show(cuts)}; give boundaries that rise from 0 to {last}")


def _check_pairs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    counts = len(cu_seqlens_q) - 1, len(cu_seqlens_k) - 1
    if counts[0] != counts[1]:
        raise ValueError(f"cu_seqlens_k has {counts[1]} documents and cu_seqlens_q {counts[0]}; give both the same")
    if not (_can_read(cu_seqlens_q) and _can_read(cu_seqlens_k)):
        return
    lengths = zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist(), strict=True)
    for document, (rows, keys) in enumerate(lengths):
        if rows > keys:
            raise ValueError(
                f"cu_seqlens_q gives document {document} {rows} queries and cu_seqlens_k {keys} keys; queries end "
                "where keys end, so give each document at least as many keys"
            )


def _check_lengths(kv_lengths: Tensor, q: Tensor, k: Tensor) -> None:
    batch, keys = k.shape[0], k.shape[2]
    if kv_lengths.dtype not in (torch.int32, torch.int64) or kv_lengths.shape != (batch,):
        got = f"{kv_lengths.dtype} of shape {_shape(kv_lengths)}"
        raise ValueError(f"kv_lengths is {got}; give int32 or int64 [B], B = {batch}")
    if q.shape[2] == keys > 1:
        raise ValueError(
            f"kv_lengths is given with as many queries as keys ({keys}): the last query is aligned to the last valid "
            "key, which would shift the queries of a padded batch; leave it out for right padding, which causal "
            "attention never sees, or give a key_mask for left padding"
        )
    if _can_read(kv_lengths) and not 0 <= int(kv_lengths.min()) <= int(kv_lengths.max()) <= keys:
        raise ValueError(f"kv_lengths is {show(kv_lengths.tolist())}; give values from 0 to Lk = {keys}")


def _check_device(name: str, x: Tensor | None, q: Tensor) -> None:
    if x is not None and x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}; move them to one device")


def _can_read(x: Tensor) -> bool:
    """Whether the values of x can be read without a device sync or a graph break."""
    return x.device.type == "cpu" and not is_traced([x])


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
