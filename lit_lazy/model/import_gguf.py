"""Models in one GGUF file, the format of llama.cpp, quantised or not."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGUFValueType, TokenType
from torch import Tensor

from lit_lazy.data.pipeline.tokeniser import build_bpe
from lit_lazy.model.import_convert import PARTS
from lit_lazy.support.error_messages import describe_exception, one_line, short_repr
from lit_lazy.support.machine import require_memory

PAIRED = {"llama": True, "qwen2": False, "qwen3": False}
"""Architectures, and whether the file's queries and keys are ordered for a rotation of neighbouring dimensions."""
ABOUT = ("general.", "tokenizer.", "quantize.", "GGUF.")
"""Beginnings of the names of fields that are not the model's settings."""
BLOCK_NUMBERS = 2**22
"""Numbers that are dequantised at a time."""
MOST_FIELDS, MOST_VALUES, MOST_TENSORS = 2**12, 2**21, 2**16
"""Fields of a file, values in all their arrays and tensors, at most; the largest vocabularies have 2**18 tokens."""


class BoundedReader(GGUFReader):
    """The library's own takes a count that the file states at its word, and reads on behind the file's end."""

    values = 0

    def _build_fields(self, offs: int, count: int) -> int:
        _require_few("fields", count, MOST_FIELDS)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> Any:
        _require_few("tensors", count, MOST_TENSORS)
        return super()._build_tensor_info(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            (count,) = self._get(orig_offs + 4, np.uint64)
            self.values += int(count)
            _require_few("values", self.values, MOST_VALUES)
        return super()._get_field_parts(orig_offs, raw_type)


def _require_few(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"{count} {what}, at most {most} are read")


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    """Settings and weights, float32, by the names of transformers, and the tokeniser as JSON.

    Raises a one-line ValueError for a damaged file, or one that holds what is not known.
    """
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
    numbers = sum(int(tensor.n_elements) for tensor in reader.tensors)
    require_memory({"numbers": numbers}, 4 * numbers)
    try:
        settings, tokenizer = make_settings(kind, fields), make_tokenizer(fields)
        names = _list_names(kind, min(settings["num_hidden_layers"], len(reader.tensors)))
        weights = dict(read_weight(path, tensor, names, settings) for tensor in reader.tensors)
    except KeyError as error:
        raise ValueError(f"has no field {error}; convert the model again with llama.cpp") from None
    except (TypeError, AttributeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"has a field of another kind ({one_line(error)})") from None
    return settings | {"tie_word_embeddings": "lm_head.weight" not in weights}, weights, tokenizer


def make_settings(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields under the names of transformers. Raises KeyError for a missing one, ValueError for an unknown one."""
    own = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if not name.startswith(ABOUT)}
    heads, width = own.pop("attention.head_count"), own.pop("embedding_length")
    head_dim = own.pop("attention.key_length", width // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (found := own.pop(name, head_dim)) != head_dim:
            raise ValueError(f"{kind}.{name}={found}: not known with heads of {head_dim}")
    if (scaling := own.pop("rope.scaling.type", "none")) != "none":
        raise ValueError(f"{kind}.rope.scaling.type={scaling!r}: not known in a GGUF; import the model's safetensors")
    ends = [token for name in ("eos", "eot", "eom") if (token := _find_token(fields, name)) is not None]
    settings = {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": own.pop("feed_forward_length"),
        "num_hidden_layers": own.pop("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.pop("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.pop("context_length"),
        "rms_norm_eps": _widen(own.pop("attention.layer_norm_rms_epsilon")),
        "rope_parameters": {"rope_type": "default", "rope_theta": _widen(own.pop("rope.freq_base", 10000.0))},
        "vocab_size": own.pop("vocab_size", len(fields["tokenizer.ggml.tokens"])),
        "bos_token_id": _find_token(fields, "bos"),
        "eos_token_id": ends[0] if len(set(ends)) == 1 else ends or None,
        "pad_token_id": _find_token(fields, "padding"),
    }
    for name, value in own.items():
        if value != 0 or isinstance(value, bool):  # llama.cpp takes a factor or a count of 0 for none
            full = name if name in fields else f"{kind}.{name}"
            raise ValueError(f"{full}={short_repr(value)}: not known in a GGUF; import the model's safetensors")
    return settings


def _widen(number: float) -> float:
    """The decimal number that a float32 was made from."""
    return float(str(np.float32(number)))


def _list_names(kind: str, layers: int) -> dict[str, str]:
    """The names of transformers by those of a file, both without `weight` or `bias`."""
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    blocks = ("", "model.", *(f"model.layers.{layer}." for layer in range(layers)))
    names = [block + part for block in blocks for part, ours in PARTS.items() if " " not in ours]  # no fused ones
    return {found: name for name in names if (found := known.get_name(name))}


def read_weight(
    path: Path, tensor: ReaderTensor, names: Mapping[str, str], settings: Mapping[str, Any]
) -> tuple[str, Tensor]:
    """A tensor by the name of transformers; an unknown name is kept, so that transformers refuses it."""
    stem, _, kind = tensor.name.rpartition(".")
    name, part = f"{names.get(stem, stem)}.{kind}", stem.rpartition(".")[2]
    read, done = torch.empty([int(size) for size in reversed(tensor.shape)]), 0
    for rows in _read_blocks(path, tensor):
        read[done : done + len(rows)] = rows
        done += len(rows)
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
    if heads is None or not PAIRED[settings["model_type"]]:
        return name, read
    # Rows (2i, 2i + 1) of each head as (i, i + D / 2).
    return name, read.unflatten(0, (settings[heads], -1, 2)).transpose(1, 2).reshape(read.shape)


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


def _find_token(fields: Mapping[str, Any], name: str) -> int | None:
    """The id of a special token, None if the file has none. Raises ValueError for an id beyond the vocabulary."""
    field = f"tokenizer.ggml.{name}_token_id"
    token = fields.get(field)
    if token is None or token in NO_TOKEN:
        return None
    if not 0 <= token < len(fields["tokenizer.ggml.tokens"]):
        raise ValueError(f"{field}={token}: is no token of the file; convert the model again")
    return token


def make_tokenizer(fields: Mapping[str, Any]) -> str:
    """The tokeniser as JSON. Raises KeyError for a missing field, ValueError for a kind that is not known."""
    model, kind = fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model={model!r}: only 'gpt2' (byte-level BPE) is known")
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    kinds: Sequence[int] = fields["tokenizer.ggml.token_type"]
    special = {token: kind == TokenType.CONTROL for token, kind in zip(tokens, kinds, strict=True) if kind in _ADDED}
    added_by_default = kind == "llama-bpe"  # as by llama.cpp
    begins = fields.get("tokenizer.ggml.add_bos_token", added_by_default)
    token = _find_token(fields, "bos") if begins else None
    begin = None if token is None else tokens[token]
    return build_bpe(tokens, fields["tokenizer.ggml.merges"], special, kind, begin)


NO_TOKEN = (-1, 2**32 - 1)
"""llama.cpp's LLAMA_TOKEN_NULL, signed and unsigned."""
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)
