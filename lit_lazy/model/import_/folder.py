"""Models in a folder of config.json, safetensors and tokenizer.json, as transformers writes it and the Hub holds it."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from lit_lazy.model.import_.kinds import KINDS, PICKLES
from lit_lazy.model.import_.published import PublishedModel, Weight, make_pickle_error, rename
from lit_lazy.support.disk import open_file
from lit_lazy.support.errors import one_line

CONFIG, TOKENIZER, SINGLE, INDEX = "config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"
PARTS = {
    "model.embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "head",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""Part of a tensor's name -> this project's."""
RECOMPUTED = ".rotary_emb.inv_freq"
"""End of the name of a tensor that follows from the settings, in old files."""
MOST_HEADER = 2**24
"""Bytes of a header or of settings, at most: reading a tensor parses the header again, and published ones are small."""
FLOATS = ("F64", "F32", "F16", "BF16")


def download(name: str) -> Path:
    """Folder of a model of the Hub, from the cache without a network. Raises a one-line ValueError if that fails."""
    import huggingface_hub

    from lit_lazy.data.pipeline.documents import go_offline_unless_hub_answers

    go_offline_unless_hub_answers()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[CONFIG, TOKENIZER, "model*.safetensors*"]))
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"is no folder, and cannot be had from the Hub ({one_line(error)}); check name and network"
        ) from None


def read_folder(folder: Path) -> PublishedModel:
    """Raises a one-line ValueError for a missing or damaged file, and for weights of no floating-point type."""
    if not (folder / CONFIG).exists():
        raise ValueError(f"has no {CONFIG}; give {KINDS}")
    config = _read_json(folder / CONFIG)
    if not (folder / TOKENIZER).exists():
        raise ValueError(f"has no {TOKENIZER}; write it there, in transformers by `tokenizer.save_pretrained(SOURCE)`")
    weights: dict[str, Weight] = {}
    for name, file in _find_files(folder).items():
        if not name.endswith(RECOMPUTED):
            weights[rename(name, "model.layers", PARTS)] = file
    return PublishedModel(config, weights, _read(folder / TOKENIZER).decode(errors="replace"))


def _read(file: Path) -> bytes:
    try:
        with open_file(file) as opened:
            return opened.read()
    except OSError as error:
        raise ValueError(f"{file.name}: cannot be read ({error.strerror})") from None


def _read_json(file: Path) -> dict[str, Any]:
    content = _read(file)
    if len(content) > MOST_HEADER:
        raise ValueError(f"{file.name}: has {len(content)} bytes, at most {MOST_HEADER} are read")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name}: is no JSON ({one_line(error)})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file.name}: is no JSON object")
    return found


def _find_files(folder: Path) -> dict[str, Weight]:
    """Every tensor by its own name."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            if pickles := [x for x in folder.iterdir() if x.suffix in PICKLES]:
                raise make_pickle_error(pickles[0])
            raise ValueError(f"has no {SINGLE}; give {KINDS}")
        return _read_header(folder / SINGLE)
    listed = _read_json(folder / INDEX).get("weight_map")
    plain = isinstance(listed, dict) and all(isinstance(x, str) and Path(x).name == x for x in listed.values())
    if not plain:
        raise ValueError(f"{INDEX}: has no weight_map of file names")
    found: dict[str, Weight] = {}
    for file in sorted(set(listed.values())):
        header = _read_header(folder / file)
        wanted = {name for name, where in listed.items() if where == file}
        if odd := sorted(wanted ^ header.keys()):
            raise ValueError(f"{file}: {odd[0]} is {'missing' if odd[0] in wanted else f'not listed in {INDEX}'}")
        found |= header
    return found


def _read_header(file: Path) -> dict[str, Weight]:
    """The tensors of a safetensors file, whose header and size the library checks."""
    try:
        with open_file(file) as opened:
            size = int.from_bytes(opened.read(8), "little")
        if MOST_HEADER < size < file.stat().st_size:
            raise ValueError(f"its header has {size} bytes, at most {MOST_HEADER} are read")
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            kinds = {name: part.get_dtype() for name, part in slices.items()}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    except OSError as error:
        raise ValueError(f"{file.name}: cannot be read ({error.strerror or one_line(error)})") from None
    except Exception as error:  # the library's own type, of no useful base
        raise ValueError(f"{file.name}: is no safetensors file, or damaged ({one_line(error)})") from None
    if odd := [name for name, kind in kinds.items() if kind not in FLOATS]:
        raise ValueError(f"{file.name}: {odd[0]} is of {kinds[odd[0]]}; only {', '.join(FLOATS)} are known")
    return {name: Weight(shape, partial(_read_tensor, file, name)) for name, shape in shapes.items()}


def _read_tensor(file: Path, name: str) -> Iterator[Tensor]:
    """The tensor, mapped into memory alone, so that what was read is not kept there."""
    with safe_open(file, "pt") as opened:
        yield opened.get_tensor(name)
