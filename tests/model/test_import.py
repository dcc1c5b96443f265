"""Import: a published model gives transformers' logits, with cache and padding, from any layout of its files."""

import os
from pathlib import Path

import gguf
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read at the import of transformers, so that no test uses the network

import transformers
from published import FAMILIES, Q8, make_published, write_gguf
from subwords import bpe
from tokenizers import Regex, Tokenizer, pre_tokenizers

from lit_lazy.command.main import main
from lit_lazy.data.prompts import Prompts
from lit_lazy.model.generation import generate
from lit_lazy.training import checkpoints
from lit_lazy.training.module import LitLM

__all__ = ["bpe"]
LENGTH = 40
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def imported(source: Path, out: Path) -> LitLM:
    assert main(["import", str(source), str(out)]) == 0
    return checkpoints.load(out)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_gives_the_logits_of_transformers(
    family: str, bpe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also exported again."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    theirs = make_published(tmp_path / "source", family, bpe)
    ours = imported(tmp_path / "source", tmp_path / "new" / "model.ckpt").model.eval()
    tokens = torch.randint(304, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    expected = theirs(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-5)
    prompts = [tokens[0].tolist(), tokens[1, :7].tolist()]  # with padding on the left
    padded = torch.tensor([prompts[0], [0] * (LENGTH - 7) + prompts[1]])
    mask = torch.tensor([[1] * LENGTH, [0] * (LENGTH - 7) + [1] * 7])
    greedy = theirs.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert generate(ours, prompts, 8) == greedy[:, LENGTH:].tolist()
    assert main(["export", str(tmp_path / "new" / "model.ckpt"), str(tmp_path / "out")]) == 0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    torch.testing.assert_close(again(tokens).logits, expected, rtol=0, atol=1e-5)


TEXT = "It's 2026: don't\n\n\tcount to 12345 <|endoftext|> naïve ✓  "
BY_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [pre_tokenizers.Split(Regex(QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")), "isolated"), BY_BYTES],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2_WORDS), "isolated"), BY_BYTES],
}
GGUFS = [
    ("Llama", "llama", "smollm"),
    ("Llama", "llama", "llama-bpe"),
    ("Qwen2", "qwen2", "qwen2"),
    ("Qwen3", "qwen3", "qwen2"),
]


@pytest.mark.parametrize(("family", "kind", "pre"), GGUFS)
@torch.no_grad()
def test_a_gguf_gives_what_its_numbers_say_and_the_tokens_of_its_kind(
    family: str, kind: str, pre: str, bpe: Path, tmp_path: Path
) -> None:
    theirs = make_published(tmp_path / "source", family, bpe)
    write_gguf(tmp_path / "model.gguf", tmp_path / "source", kind, pre)
    module = imported(tmp_path / "model.gguf", tmp_path / "model.ckpt")
    assert module.cfg.model == imported(tmp_path / "source", tmp_path / "other" / "model.ckpt").cfg.model
    for value in theirs.state_dict().values():
        if value.ndim == 2 and value.shape[1] == 32:
            value.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(value.numpy(), Q8), Q8)))
    tokens = torch.randint(304, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module.model.eval()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    reference = Tokenizer.from_file(str(bpe))
    reference.no_truncation()
    reference.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[pre])
    prompts = Prompts(module.cfg.data, 304)
    assert prompts.encode("x", TEXT.encode()) == reference.encode(TEXT, add_special_tokens=False).ids
    assert (prompts.begin, prompts.end) == (0, 1)


@torch.no_grad()
def test_shards_and_another_place_give_the_same_bytes(bpe: Path, tmp_path: Path) -> None:
    model = make_published(tmp_path / "one", "Qwen3", bpe).bfloat16()
    for name, size in (("one", "1GB"), ("many", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        (tmp_path / name / "tokenizer.json").write_bytes(bpe.read_bytes())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    found = []
    for source, out in (("one", "a/x.ckpt"), ("one", "b/y.ckpt"), ("many", "c/z.ckpt")):
        module = imported(tmp_path / source, tmp_path / out)
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
        found.append([file.read_bytes() for file in sorted((tmp_path / out).parent.iterdir(), key=lambda x: x.suffix)])
    assert found[0] == found[1] == found[2]
