"""The tokens of what a user types, for a model that was trained on some data."""

from collections.abc import Iterable, Iterator, Sequence

from lit_lazy.data.base import DataConfig
from lit_lazy.data.pipeline.tokeniser import Tokenizer
from lit_lazy.support.checks import require
from lit_lazy.support.errors import describe_exception


class Prompts:
    """Text, or for data without one numbers between blanks, as tokens of a model, and back."""

    def __init__(self, data: DataConfig, vocab_size: int) -> None:
        """Raises ValueError, in one line, where the data's tokenizer cannot be had, or is not that of the model."""
        self.name, self.vocab_size = type(data).__name__, vocab_size
        try:
            self.tokenizer: Tokenizer | None = data.load_tokenizer()
        except ValueError:
            raise
        except Exception as error:  # of a user's own class
            raise ValueError(f"data={self.name}: load_tokenizer() fails: {describe_exception(error)}") from error
        size = vocab_size if self.tokenizer is None else self.tokenizer.vocab_size
        wanted = f"the model reads {vocab_size} tokens; give it the tokenizer of its training"
        require(size == vocab_size, f"data={self.name}: tokens of its tokenizer", size, wanted)

    @property
    def end(self) -> int | None:
        """The token behind every document, where there is one."""
        return None if self.tokenizer is None else self.tokenizer.separator

    @property
    def begin(self) -> int | None:
        """The token before every document, where there is one."""
        return None if self.tokenizer is None else self.tokenizer.begin

    def encode(self, option: str, text: bytes) -> list[int]:
        """At least one token; where a text is empty, the one that ends the document before.

        Raises ValueError, in one line that names the option, for what cannot be read.
        """
        if self.tokenizer is None:
            return self._parse_numbers(option, text.decode(errors="replace"))
        try:
            return self.tokenizer.encode([text])[0].tolist() or [self.tokenizer.separator]
        except UnicodeDecodeError:
            raise ValueError(f"{option}: is no UTF-8 text") from None

    def _parse_numbers(self, option: str, text: str) -> list[int]:
        words = text.split()
        numbers = [int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 20]
        if len(numbers) < len(words) or not all(number < self.vocab_size for number in numbers) or not numbers:
            raise ValueError(
                f"{option}: {self.name} has no text; a prompt is token numbers from 0 to {self.vocab_size - 1} between "
                "blanks, for example '0 1 2'"
            )
        return numbers

    def decode(self, ids: Iterable[int], after: Sequence[int]) -> Iterator[str]:
        """The text of tokens that follow a prompt's, in pieces as they come."""
        return (f"{token} " for token in ids) if self.tokenizer is None else self.tokenizer.decode(ids, after)
