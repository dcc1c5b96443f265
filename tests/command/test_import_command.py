"""`lit-lazy import`: wrong sources are refused in one line before anything is written; every command takes a result."""

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import gguf
import pytest
import torch
from mistakes import expect_refusal
from published import make_published, transformers, write_gguf
from safetensors.torch import load_file, save_file
from subwords import bpe
from tokenizers import Tokenizer

from lit_lazy import load
from lit_lazy.command.main import main
from lit_lazy.model.generation import Prompts
from lit_lazy.model.import_load import MOST_HEADER
from lit_lazy.report.diagnose_checkpoint import Request, load_sources
from lit_lazy.support import disk, machine
from lit_lazy.training import checkpoints

__all__ = ["bpe"]
IMPORT = ["import", "source", "new/model.ckpt"]


@pytest.fixture
def source(bpe: Path, place: Path) -> Path:
    """A folder of this name."""
    make_published(place / "source", "Qwen2", bpe)
    return place / "source"


def change_config(**changes: object) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        content = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(content | changes))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    def change_file(source: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        change(tensors)
        save_file(tensors, source / "model.safetensors")

    return change_file


def overwrite(name: str, content: bytes | str) -> Callable[[Path], object]:
    return lambda source: (source / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(name: str) -> Callable[[Path], object]:
    return lambda source: (source / name).unlink()


def rename(name: str) -> Callable[[Path], object]:
    return lambda source: (source / "model.safetensors").rename(source / name)


def index_shards(index: dict[str, object]) -> Callable[[Path], object]:
    def write(source: Path) -> None:
        rename("part.safetensors")(source)
        (source / "model.safetensors.index.json").write_text(json.dumps(index))

    return write


K = "model.layers.3.self_attn.k_proj.bias"
DIFFER = "the logits differ from those of transformers' Qwen2For"
ADAPTER = "adapter_config.json: is a PEFT adapter"
TOO_LONG = struct.pack("<Q", MOST_HEADER + 1) + b"{}".ljust(MOST_HEADER + 1)
SOURCES = {
    "another family": (change_config(model_type="gpt2"), "transformer.wte.weight: has no place in this decoder"),
    "no language model": (change_config(model_type="vit"), "model_type='vit': is no language model of transformers"),
    "a huge vocabulary": (change_config(vocab_size=2**40), "GB of memory, of which this machine has"),
    "no settings": (remove("config.json"), "has no config.json; give a folder with config.json and safetensors, a .gg"),
    "a pickle": (
        rename("pytorch_model.bin"),
        "pytorch_model.bin: is a pickle, which could run code, so it is not read",
    ),
    "a huge header": (overwrite("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "is no safetensors file"),
    "a header of names without end": (overwrite("model.safetensors", TOO_LONG), f"at most {MOST_HEADER} are read"),
    "a list": (overwrite("config.json", "[]"), "config.json: is no JSON object"),
    "settings without end": (overwrite("config.json", TOO_LONG), f"at most {MOST_HEADER} are read"),
    "a missing tensor": (change_tensors(lambda x: x.pop(K)), f"{K}: is missing in the files; one of 1 tensors"),
    "whole numbers": (change_tensors(lambda x: x.update({K: x[K].int()})), f"{K} is of I32; only F64, F32, F16, BF16"),
    "not finite": (change_tensors(lambda x: x[K].fill_(torch.nan)), f"{K}: is not finite"),
    "no tokenizer": (remove("tokenizer.json"), "has no tokenizer.json; write it there"),
    "a surplus tensor": (change_tensors(lambda x: x.update(extra=x[K].clone())), "extra: has no place; one of 1 ten"),
    "a shard elsewhere": (index_shards({"weight_map": {K: "../x"}}), "has no weight_map of file names"),
    "another tokenizer": (overwrite("tokenizer.json", "{}"), "tokenizer.json: cannot be used ("),
    "no end": (change_config(eos_token_id=None), None),
    "a model with an adapter": (overwrite("adapter_config.json", "{}"), ADAPTER),
    "an adapter": (lambda x: [remove("config.json")(x), overwrite("adapter_config.json", "{}")(x)], ADAPTER),
    "quantised": (change_config(quantization_config={"quant_method": "fp8"}), ": give the weights before they were qu"),
}


@pytest.mark.parametrize(("spoil", "named"), SOURCES.values(), ids=SOURCES)
def test_a_wrong_source(spoil, named, source, capsys) -> None:
    spoil(source)
    if named is None:  # <|endoftext|> is a usual name
        assert main(IMPORT) == 0
    else:
        error = expect_refusal(IMPORT, capsys)
        assert error.startswith("lit-lazy: SOURCE 'source': ")
        assert named in error


def test_tokens_are_those_of_transformers_and_no_document_has_a_control_token(bpe, place) -> None:
    make_published(place / "source", "Llama", bpe)
    change_config(eos_token_id=[1, 303, 302])(place / "source")
    content = Tokenizer.from_file(str(bpe))
    content.add_tokens(["<stop>"])  # a word, by the file
    stop = content.token_to_id("<stop>")
    content.save(str(place / "source" / "tokenizer.json"))
    generation = {"eos_token_id": [1, stop], "pad_token_id": 5}
    (place / "source" / "generation_config.json").write_text(json.dumps(generation))
    (place / "source" / "tokenizer_config.json").write_text(json.dumps({"add_prefix_space": True}))
    assert main(IMPORT) == 0
    prompts = Prompts(load("new/model.ckpt").config.data, 304)
    assert prompts.special.ids == (1, stop, 5)
    theirs = transformers.AutoTokenizer.from_pretrained("source")
    for text in ("a few words", " of text<stop>a", "It's 12345\n\n é"):
        assert prompts.encode("--prompt", text.encode()) == theirs.encode(text)
    assert prompts.tokenizer is not None
    assert content.id_to_token(5) == "$"
    (words,) = prompts.tokenizer.encode([b"$<stop><|endoftext|>"])
    assert {*words} & {*prompts.special.ids} == {5}  # a pad that is a byte of the text too


def test_a_tokenizer_that_is_larger_than_the_embedding(bpe, place, capsys) -> None:
    make_published(place / "source", "Llama", bpe, words=200)
    assert "the embedding only 200 rows" in expect_refusal(IMPORT, capsys)
    content = json.loads((place / "source" / "tokenizer.json").read_text().replace("<|endoftext|>", "<end>"))
    content["added_tokens"][1]["content"] = "<end>"
    make_published(place / "source", "Llama", bpe)
    (place / "source" / "tokenizer.json").write_text(json.dumps(content))
    assert main(IMPORT) == 0  # token 1 ends a text by config.json
    change_config(eos_token_id=None)(place / "source")
    remove("generation_config.json")(place / "source")
    error = expect_refusal(["import", "source", "other/model.ckpt"], capsys)
    assert "eos_token_id=None: names no token, and the tokenizer has none of" in error


def test_a_wrong_gguf(bpe, place, capsys, monkeypatch) -> None:
    make_published(place / "published", "Llama", bpe)
    write_gguf(place / "source.gguf", place / "published", "llama", "smollm")
    whole = (place / "source.gguf").read_bytes()
    kind = struct.pack("<I", int(gguf.GGMLQuantizationType.Q8_0)) + b"\0" * 8
    assert kind in whole
    unknown = whole.replace(kind, struct.pack("<I", 99) + b"\0" * 8)
    tokens = b"\x15\0\0\0\0\0\0\0tokenizer.ggml.tokens" + struct.pack("<I", gguf.GGUFValueType.ARRAY)
    at = whole.index(tokens) + len(tokens)
    endless = whole[:at] + struct.pack("<IQ", gguf.GGUFValueType.UINT8, 2**60) + whole[at + 12 :]
    at = whole.index(b"token_embd.weight") + len(b"token_embd.weight") + 24
    wrapped = whole[:at] + struct.pack("<Q", 2**64 - 32) + whole[at + 8 :]
    for content, named in (
        (whole[:-64], "is no GGUF file, or damaged"),
        (endless, f"{2**60} values, at most"),
        (wrapped, "is no GGUF file, or damaged (FloatingPointError: overflow"),
        (unknown, "(99) is not a valid GGMLQuantizationType"),
        (whole.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.merged"), "has no field 'tokenizer.ggml.merges'"),
        (whole.replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0lambs"), "general.architecture='lambs': not known"),
        (whole.replace(b"\6\0\0\0\0\0\0\0smollm", b"\6\0\0\0\0\0\0\0smallm"), "tokenizer.ggml.pre='smallm': not known"),
        (whole[:16] + struct.pack("<Q", 2**20) + whole[24:], f"{2**20} fields, at most 4096 are read"),
    ):
        (place / "source.gguf").write_bytes(content)
        assert named in expect_refusal(["import", "source.gguf", "new/model.ckpt"], capsys), named
    base = b"llama.rope.freq_base" + struct.pack("<I", gguf.GGUFValueType.FLOAT32)
    none = whole.replace(base + struct.pack("<f", 1e4), base.replace(b"freq_base", b"nothing12") + bytes(4))
    assert none != whole
    (place / "source.gguf").write_bytes(none)
    assert main(["import", "source.gguf", "none/model.ckpt"]) == 0
    (place / "source.gguf").write_bytes(whole)
    given = ["import", "source.gguf", "new/model.ckpt"]
    assert "its SHA-256 is " in expect_refusal([*given, "--sha256", 64 * "0"], capsys)

    monkeypatch.setattr(gguf, "dequantize", Mock(side_effect=NotImplementedError))
    assert "its quantisation Q8_0 is not known" in expect_refusal(given, capsys)


@pytest.mark.usefixtures("source")
def test_other_mistakes(place, capsys, caplog, monkeypatch) -> None:
    (place / "full").mkdir()
    (place / "notes.txt").write_text("mine")
    (place / "full" / "tokenizer.json").write_text("{}")
    for words, named in (
        (["source", "notes.txt"], "OUT 'notes.txt': exists already; name another file, or remove it first"),
        (["source", "full/new.ckpt"], "full/tokenizer.json is another model's; name a file in another folder"),
        (["source", "new.ckpt", "--sha256", 64 * "0"], "SOURCE='source': cannot be read (Is a directory)"),
    ):
        assert named in expect_refusal(["import", *words], capsys)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "measure_total_memory", lambda: 1000)
        assert "would take at least 0 GB of memory" in expect_refusal(IMPORT, capsys)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "describe_shortage", lambda _folder, size: f"{size} bytes")
        assert "OUT 'new/model.ckpt': the disk lacks " in expect_refusal(IMPORT, capsys)
        patch.setitem(sys.modules, "transformers", None)
        assert "transformers reads it, which is not installed; `pip install" in expect_refusal(IMPORT, capsys)
    change_config(hidden_act="gelu")(place / "source")
    assert DIFFER in expect_refusal(IMPORT, capsys)
    assert main([*IMPORT, "--unchecked"]) == 0
    assert "not compared with transformers' model (--unchecked)" in capsys.readouterr().out
    checkpoints.load(Path("new/model.ckpt"))
    assert "imported with --unchecked" in caplog.text


def test_a_text_ends_where_the_source_ends_it(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also exported again, with the other special tokens."""
    assert main(IMPORT) == 0
    free = load("new/model.ckpt").generate([5, 6], tokens=8)
    ids = {"bos_token_id": 3, "eos_token_id": [1, free[4]], "pad_token_id": 2}
    (source / "generation_config.json").write_text(json.dumps(ids))
    assert main(["import", "source", "ends/model.ckpt"]) == 0
    model = load("ends/model.ckpt")
    assert model.generate([5, 6], tokens=8) == free[: free.index(free[4])]
    assert model.config.data.end_of_text is None, "documents end with <|endoftext|>"
    capsys.readouterr()
    assert main(["export", "ends/model.ckpt", "out"]) == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads(Path("out", name).read_text()).items() >= ids.items()


@pytest.mark.usefixtures("source")
def test_the_experiment_of_adapt_md_continues_an_imported_model(place: Path, runs: Path) -> None:
    assert main(["import", "source", "models/own/model.ckpt"]) == 0
    text = (Path(__file__).parents[2] / "docs" / "adapt.md").read_text()
    (shown,) = re.findall(r"^```python\n# my_own.py\n(.*?)^```", text, re.M | re.S)
    (place / "own.py").write_text(shown.replace("256", "16").replace("24}", "4}").replace("steps=64", "steps=10"))
    (place / "notes.txt").write_text("\n\n".join(f"the cat sat {number} times on the mat" for number in range(40000)))
    words = ["train", "own.py", "--model.attention.normaliser=Elastic", "--threads", "1", "--runs", str(runs)]
    assert main(words) == 0
    (final,) = runs.rglob("final.ckpt")
    assert checkpoints.load(final).cfg.model.attention.qkv_bias


def write_text() -> list[str]:
    """Two files of text; the options that name them."""
    for name in ("text.txt", "held.txt"):
        Path(name).write_text(f"the cat sat on the mat, äußerst ✓ on that {name}\n\n" * 400)
    sizes = "--data.context_length=16", "--data.validation_windows=4"
    return ["--data.path=text.txt", "--data.validation=held.txt", *sizes]


@pytest.mark.usefixtures("source")
def test_every_command_takes_an_imported_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(IMPORT) == 0
    (place / "new").rename(place / "moved")
    model = "moved/model.ckpt"
    for words in (["evaluate", model], ["diagnose", model]):
        assert "data.path='': give your text, as in --data.path=FILE" in expect_refusal(words, capsys)
    data = write_text()
    assert main(["evaluate", model, *data]) == 0
    trained = checkpoints.load(Path(model))
    changed = checkpoints.change_settings(trained.cfg, data)
    request = Request(Path(model), overrides=tuple(data), lengths=(32,))
    sources = load_sources(request, trained, changed.data, trained.model)
    assert [source.context_length for source in sources.values()] == [16, 32]
    assert main(["generate", model, "--prompt", "the cat", "--tokens", "3", "--temperature", "0"]) == 0
    assert main(["export", model, "out"]) == 0
    assert "| trained | elsewhere, then imported |" in (place / "out" / "README.md").read_text()


@pytest.mark.usefixtures("source")
def test_a_replaced_tokenizer_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(IMPORT) == 0
    checkpoint = "new/model.ckpt"
    generate = ["generate", checkpoint, "--prompt", "the cat", "--tokens", "2"]
    commands = [generate, ["export", checkpoint, "exported"], ["evaluate", checkpoint, *write_text()]]
    assert main(commands[0]) == main(commands[2]) == 0
    tokenizer = place / "new" / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    words = content["model"]["vocab"]
    words["a"], words["t"] = words["t"], words["a"]  # of the same size
    tokenizer.write_text(json.dumps(content))
    for command in commands:
        error = expect_refusal(command, capsys)
        assert "tokenizer.json" in error, command
        assert "has another content than that of its training; restore it" in error, command
    with pytest.raises(ValueError, match="has another content than that of its training; restore it"):
        load(checkpoint).generate("the cat")
