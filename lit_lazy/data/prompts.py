"""Encode prompts for a trained model, and decode its tokens."""

from collections.abc import Iterable, Iterator, Sequence

from lit_lazy.data.pipeline.tokeniser import Tokenizer
from lit_lazy.data.sources_and_batches import DataConfig, SpecialTokens
from lit_lazy.data.text import Text
from lit_lazy.support.checks import require
from lit_lazy.support.errors import describe_exception, short_repr


class Prompts:
    """Converts prompts to tokens and tokens to text; data without text uses token numbers separated by spaces."""

    def __init__(self, data: DataConfig, vocab_size: int) -> None:
        """Raises a one-line ValueError if the data's tokeniser cannot be loaded or does not match the model."""
        self.name, self.vocab_size = type(data).__name__, vocab_size
        try:
            self.tokenizer: Tokenizer | None = data.load_tokenizer()
        except ValueError:
            raise
        except Exception as error:  # from a custom data class
            raise ValueError(f"data={self.name}: load_tokenizer() failed: {describe_exception(error)}") from error
        size = vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        fix = f"the model has {vocab_size} token ids; use the tokenizer it was trained with"
        require(size == vocab_size, f"data={self.name}: vocabulary size of the tokenizer", size, fix)
        self.special = SpecialTokens()
        """Tokens that begin, end and pad a text; without a tokeniser none."""
        if self.tokenizer is not None:
            end = self.tokenizer.separator
            given = data.special_tokens if isinstance(data, Text) else self.special
            self.special = given if given.ends else SpecialTokens(self.tokenizer.begin, (end,), end)

    def encode(self, option: str, text: bytes) -> list[int]:
        """Tokens of a prompt; for an empty one, the separator that ends the previous document.

        Raises a one-line ValueError, which names the option, if the prompt cannot be read.
        """
        if self.tokenizer is None:
            return self._parse_numbers(option, text.decode(errors="replace"))
        try:
            return self.tokenizer.encode([text], control=True)[0].tolist() or [self.tokenizer.separator]
        except UnicodeDecodeError:
            raise ValueError(f"{option}: is not UTF-8; convert it to UTF-8") from None

    def _parse_numbers(self, option: str, text: str) -> list[int]:
        words = text.split()
        most = self.vocab_size
        wrong = [w for w in words if not (w.isascii() and w.isdecimal() and len(w) < 20 and int(w) < most)]
        if wrong or not words:
            is_none = f"{short_repr(wrong[0])} is no token of {self.name}" if wrong else "is empty"
            numbers = f"token numbers from 0 to {self.vocab_size - 1} separated by spaces"
            raise ValueError(f"{option}: {is_none}; give {numbers}, for example '0 1 2'")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int], after: Sequence[int]) -> Iterator[str]:
        """Text of the tokens that follow the tokens `after`, piece by piece."""
        return (f"{token} " for token in ids) if self.tokenizer is None else self.tokenizer.decode(ids, after)
