"""Models in one GGUF file, the format of llama.cpp, quantised or not."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGUFValueType, TokenType
from torch import Tensor

from lit_lazy.data.pipeline.imported_tokeniser import build_bpe
from lit_lazy.model.import_.published import PublishedModel, Weight, rename
from lit_lazy.support.errors import describe_exception, one_line

PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architectures, and whether the file's queries and keys are ordered for a rotation of neighbouring dimensions."""
PARTS = {
    "token_embd": "embedding",
    "output_norm": "norm",
    "output": "head",
    "attn_norm": "attention_norm",
    "attn_q": "attention.q",
    "attn_k": "attention.k",
    "attn_v": "attention.v",
    "attn_output": "attention.out",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.up",
    "ffn_down": "mlp.down",
}
"""Part of a tensor's name -> this project's."""
BLOCK_NUMBERS = 2**22
"""Numbers that are dequantised at a time."""
MOST_PARTS = 2**22
"""Values of one array of the header, at most; the largest vocabularies have 2**18 tokens."""


class BoundedReader(GGUFReader):
    """The library's own takes a count that the file states at its word, and reads on behind the file's end."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            (count,) = self._get(orig_offs + 4, np.uint64)
            if count > MOST_PARTS:
                raise ValueError(f"an array of {count} values, at most {MOST_PARTS} are read")
        return super()._get_field_parts(orig_offs, raw_type)


def read_gguf(path: Path) -> PublishedModel:
    """Raises a one-line ValueError for a damaged file, or one that holds what is not known."""
    try:
        with np.errstate(over="raise"):  # an offset beyond 2**64 would wrap around
            reader = BoundedReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # the library raises almost anything
        raise ValueError(f"is no GGUF file, or damaged ({describe_exception(error)}); fetch it again") from None
    for tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.values():
        try:
            with np.errstate(all="ignore"):
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
        except NotImplementedError:
            raise ValueError(f"{tensor.name}: its quantisation {tensor.tensor_type.name} is not known") from None
    kind = fields.get("general.architecture")
    if kind not in PAIRED:
        raise ValueError(f"general.architecture={kind!r}: not known in a GGUF; there are {', '.join(PAIRED)}")
    if any(tensor.name.startswith("rope_freqs") for tensor in reader.tensors):
        raise ValueError("rope_freqs: the scaled rotation of a GGUF is not known; import the model's safetensors")
    try:
        config = make_config(kind, fields)
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]} if PAIRED[kind] else {}
        weights = dict(make_weight(path, tensor, heads) for tensor in reader.tensors)
        return PublishedModel(config, weights, make_tokenizer(fields))
    except KeyError as error:
        raise ValueError(f"has no field {error}; convert the model again with llama.cpp") from None
    except (TypeError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise ValueError(f"has a field of another kind ({one_line(error)})") from None


def make_config(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under the names of transformers. Raises KeyError for a missing one, ValueError for an unknown one."""
    own = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if name.startswith(f"{kind}.")}
    heads, width = own["attention.head_count"], own["embedding_length"]
    head_dim = own.get("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if own.get(name, head_dim) != head_dim:
            raise ValueError(f"{kind}.{name}={own[name]}: not known with heads of {head_dim}")
    scaling = own.get("rope.scaling.type", "none")
    if scaling != "none":
        raise ValueError(f"{kind}.rope.scaling.type={scaling!r}: not known in a GGUF; import the model's safetensors")
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": own.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own["context_length"],
        "rms_norm_eps": _widen(own["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _widen(own.get("rope.freq_base", 10000.0)),
        "sliding_window": own.get("attention.sliding_window"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
    }


def _widen(number: float) -> float:
    """The decimal number that a float32 was made from."""
    return float(str(np.float32(number)))


def make_weight(path: Path, tensor: ReaderTensor, heads: Mapping[str, int]) -> tuple[str, Weight]:
    """A tensor by this project's name. heads: of the projections, by the last part of their name, to put in order."""
    name = rename(tensor.name, "blk", PARTS)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    paired = heads.get(name.split(".")[-2]) if ".attention." in name else None
    read = partial(_read_blocks, path, tensor)
    return name, Weight(shape, read if paired is None else lambda: iter([_unpair(torch.cat([*read()]), paired)]))


def _read_blocks(path: Path, tensor: ReaderTensor) -> Iterator[Tensor]:
    """Dequantised rows. Each is mapped into memory on its own, so that what was read is not kept there."""
    stored = tensor.data
    rows = max(1, BLOCK_NUMBERS // int(tensor.shape[0])) if stored.ndim > 1 else len(stored)
    for start in range(0, len(stored), rows):
        shape = (min(rows, len(stored) - start), *stored.shape[1:])
        offset = int(tensor.data_offset) + start * stored.strides[0]
        part = np.memmap(path, stored.dtype, "c", offset, shape)  # torch wants an array that could be written
        with np.errstate(all="ignore"):  # an infinite scale; the result is refused as not finite
            numbers = gguf.dequantize(part, tensor.tensor_type)
        yield torch.from_numpy(numbers)


def _unpair(weight: Tensor, heads: int) -> Tensor:
    """Rows (2i, 2i + 1) of each head as (i, i + D / 2)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def make_tokenizer(fields: Mapping[str, Any]) -> str:
    """The tokeniser as JSON. Raises KeyError for a missing field, ValueError for a kind that is not known."""
    model, kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={model!r}: only 'gpt2' (byte-level BPE) is known")
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = fields["tokenizer.ggml.token_type"]
    special = {token: kind == TokenType.CONTROL for token, kind in zip(tokens, kinds, strict=True) if kind in _ADDED}
    begin = tokens[fields["tokenizer.ggml.bos_token_id"]] if fields.get("tokenizer.ggml.add_bos_token") else None
    return build_bpe(tokens, fields["tokenizer.ggml.merges"], special, kind, begin)


_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)
