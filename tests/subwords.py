"""A small tokenizers file."""

from pathlib import Path

import pytest
import tokenizers


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """A tokenizers file that adds a begin token to texts, which no document here has."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, äußerst ✓ on that"] * 5, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "bpe.json"))
    return tmp_path / "bpe.json"
