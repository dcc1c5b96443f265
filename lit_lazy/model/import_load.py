"""A source, loaded as a model of transformers by its own rules, and its tokeniser. Nothing of it is executed."""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from lit_lazy.data.pipeline.tokeniser import parse_tokenizer
from lit_lazy.model.import_convert import find_parts
from lit_lazy.support.disk import open_file
from lit_lazy.support.error_messages import describe_exception, one_line, short_repr
from lit_lazy.support.machine import require_memory
from lit_lazy.support.names_to_paths import MODEL_SOURCES, PICKLES, is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
ADAPTER, SINGLE, INDEX = "adapter_config.json", "model.safetensors", "model.safetensors.index.json"
MOST_HEADER = 2**24
"""Bytes of a header or of settings, at most; published ones are small."""
FLOATS = ("F64", "F32", "F16", "BF16")
WRAPPED = {r"^(?:_orig_mod\.|module\.)+": ""}
"""Beginnings of names that torch.compile and data parallelism add."""


def load_source(given: Path) -> tuple["PreTrainedModel", str]:
    """The model in a folder, in a .gguf file, or of this name on the Hub, float32. Raises a one-line ValueError."""
    if given.is_dir():
        return load_folder(given)
    if not given.exists() and is_hub_name(given):
        return load_folder(download(str(given)))
    if given.suffix in PICKLES:
        raise make_pickle_error(given)
    if given.suffix != ".gguf":
        raise ValueError(f"must be {MODEL_SOURCES}")
    from lit_lazy.model.import_gguf import read_gguf

    settings, weights, tokenizer = read_gguf(given)
    return load_model(settings, weights), tokenizer


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file, mapped into memory on its own, so that what was read is not kept there."""

    file: Path
    name: str

    def __getitem__(self, part: Any) -> Tensor:
        with safe_open(self.file, "pt") as opened:
            return opened.get_slice(self.name)[part]


def make_pickle_error(file: Path) -> ValueError:
    return ValueError(f"{file.name}: is a pickle, which could run code, so it is not read; convert it to safetensors")


def download(name: str) -> Path:
    """Folder of a model of the Hub, from the cache without a network. Raises a one-line ValueError if that fails."""
    import huggingface_hub

    from lit_lazy.data.pipeline.hub import go_offline_unless_hub_answers

    go_offline_unless_hub_answers()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "model*.safetensors"]))
    except (OSError, ValueError, RuntimeError) as error:
        problem = f"is no folder, and cannot be had from the Hub ({one_line(error)})"
        raise ValueError(f"{problem}; check name and network") from None


def load_folder(folder: Path) -> tuple["PreTrainedModel", str]:
    """Raises a one-line ValueError for files that are missing or damaged, or hold other weights than floating-point."""
    if (folder / ADAPTER).exists():  # alone, or to be added to the weights beside it, as transformers does
        fix = "give the folder that peft's `merge_and_unload().save_pretrained(FOLDER)` writes, or remove the file"
        raise ValueError(f"{ADAPTER}: is a PEFT adapter, which is not read; {fix}")
    if not (folder / CONFIG).exists():
        raise ValueError(f"has no {CONFIG}; give {MODEL_SOURCES}")
    settings = _read_json(folder / CONFIG)
    if not (folder / TOKENIZER).exists():
        raise ValueError(f"has no {TOKENIZER}; write it there, in transformers by `tokenizer.save_pretrained(SOURCE)`")
    weights = {name: stored for file in find_files(folder, settings) for name, stored in _list_tensors(file).items()}
    return load_model(settings, weights, folder), load_tokenizer(folder)


def load_tokenizer(folder: Path) -> str:
    """The tokeniser that transformers makes of a folder's files, as JSON of the tokenizers library.

    Raises a one-line ValueError if it cannot be loaded.
    """
    import transformers

    parse_tokenizer(_read(folder / TOKENIZER))
    with one_line_errors(TOKENIZER):
        found: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return found.backend_tokenizer.to_str()


def find_files(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The files of weights, found as transformers finds them. Raises a one-line ValueError if there are none."""
    names = settings.get("transformers_weights"), SINGLE, INDEX
    there = [name for name in names if name and (folder / name).exists()]
    if not there:
        if pickles := [x for x in folder.iterdir() if x.suffix in PICKLES]:
            raise make_pickle_error(pickles[0])
        raise ValueError(f"has no {SINGLE}; give {MODEL_SOURCES}")
    listed: Any = {there[0]: there[0]}
    if there[0].endswith(".index.json"):
        listed = _read_json(folder / there[0]).get("weight_map")
    of_files = isinstance(listed, dict) and all(isinstance(x, str) and Path(x).name == x for x in listed.values())
    if not of_files:
        raise ValueError(f"{there[0]}: has no weight_map of file names")
    return [folder / name for name in sorted(set(listed.values()))]


def load_model(
    settings: Mapping[str, Any], weights: Mapping[str, Any], folder: Path | None = None
) -> "PreTrainedModel":
    """The model of some settings, or those of a folder, and weights under transformers' names.

    Raises a one-line ValueError for a model that transformers does not load, or not completely.
    """
    import transformers

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ValueError(f"model_type={kind!r}: is no model of transformers {transformers.__version__}")
    named = transformers.CONFIG_MAPPING[kind].attribute_map.get("num_hidden_layers", "num_hidden_layers")
    layers = settings.get(named)
    if isinstance(layers, int) and layers > len(weights):  # before so many layers are built
        raise ValueError(f"{named}={layers}: the files have only {len(weights)} tensors")
    generation = None
    with one_line_errors("its settings" if folder is None else CONFIG):
        if folder is None:
            config = transformers.AutoConfig.for_model(**settings)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            if (folder / GENERATION).exists():
                generation = transformers.GenerationConfig.from_dict(_read_json(folder / GENERATION))
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"model_type={kind!r}: is no language model of transformers")
        if given := getattr(config, "quantization_config", None):
            raise ValueError(f"quantization_config={short_repr(given)}: give the weights before they were quantised")
        model_class: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        with torch.device("meta"):
            empty = model_class(config)
    find_parts(empty)  # refuses most other models before their weights are read
    require_memory({"parameters": empty.num_parameters()}, 4 * empty.num_parameters())
    with one_line_errors("its weights"):
        model, report = model_class.from_pretrained(
            None,
            config=config,
            generation_config=generation,
            state_dict=dict(weights),
            dtype=torch.float32,
            attn_implementation="sdpa",
            key_mapping=WRAPPED,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ValueError(f"{name}: has shape {list(found)}, and by the settings {list(expected)}")
    for what, fault in (("missing_keys", "is missing in the files"), ("unexpected_keys", "has no place")):
        if names := sorted(report[what]):
            raise ValueError(f"{names[0]}: {fault}; one of {len(names)} tensors, by {model_class.__name__}")
    return model


@contextmanager
def one_line_errors(named: str) -> Iterator[None]:
    """Turns whatever a library raises into a one-line ValueError that names what it was about."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        raise ValueError(f"{named}: {describe_exception(error)}") from None


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


def _list_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, whose header and size the library checks."""
    try:
        with open_file(file) as opened:
            size = int.from_bytes(opened.read(8), "little")
        if MOST_HEADER < size < file.stat().st_size:
            raise ValueError(f"its header has {size} bytes, at most {MOST_HEADER} are read")
        with safe_open(file, "pt") as opened:
            kinds = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    except OSError as error:
        raise ValueError(f"{file.name}: cannot be read ({error.strerror or one_line(error)})") from None
    except Exception as error:  # the library's own type, of no useful base
        raise ValueError(f"{file.name}: is no safetensors file, or damaged ({one_line(error)})") from None
    if odd := [name for name, kind in kinds.items() if kind not in FLOATS]:
        raise ValueError(f"{file.name}: {odd[0]} is of {kinds[odd[0]]}; only {', '.join(FLOATS)} are known")
    return {name: StoredTensor(file, name) for name in kinds}
