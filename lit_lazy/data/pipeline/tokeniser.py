"""Tokenisers: bytes, or a file of the `tokenizers` library."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from lit_lazy.support.checks import require
from lit_lazy.support.disk import open_file
from lit_lazy.support.errors import one_line

BYTES = "bytes"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Turns documents into token ids."""

    vocab_size: int
    begin: int | None
    """The id put before every document; None for none."""
    separator: int
    """The id put behind every document."""

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        """The ids of each document, without those that begin and end it."""
        ...

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """The text of ids that follow others, in pieces as they come; of a character that is cut off, nothing."""
        ...

    def to_json(self) -> str:
        """A file of the `tokenizers` library that gives the same ids, and no special tokens of its own."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """What a tokeniser is made of."""

    name: str
    """`BYTES`, or a JSON file of the tokenizers library."""
    begin_of_text: str | None = None
    end_of_text: str | None = None

    @property
    def special_tokens(self) -> list[str | None]:
        """The tokens that begin and end a document, as they were asked for."""
        return [self.begin_of_text, self.end_of_text]

    @property
    def digest(self) -> str:
        """Of the file, and of the library that reads it."""
        if self.name == BYTES:
            return BYTES
        try:
            with open_file(self._path) as file:
                content = file.read()
        except (OSError, RuntimeError, ValueError, MemoryError) as error:
            why = getattr(error, "strerror", None) or one_line(error)
            raise ValueError(
                f"data.tokenizer={self.name!r}: cannot be read ({why}); give 'bytes' or a JSON file of "
                "the tokenizers library"
            ) from None
        return f"{version('tokenizers')} {hashlib.sha256(content).hexdigest()}"

    def build(self) -> Tokenizer:
        """Raises ValueError, in one line, where there is no such tokeniser."""
        return ByteTokenizer() if self.name == BYTES else FileTokenizer(self._path, *self.special_tokens)

    @property
    def _path(self) -> Path:
        return Path(self.name).expanduser()


class ByteTokenizer:
    """Ids are bytes; NUL is the separator, and may not occur in a document."""

    vocab_size = 256
    begin = None
    separator = 0

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        for document in documents:
            if (at := document.find(b"\0")) >= 0:
                raise ValueError(
                    f"data.tokenizer='bytes': the document {document[:40]!r}... holds a NUL byte at byte {at}, which "
                    "separates documents; remove it, or give a tokenizers file"
                )
        return [np.frombuffer(document, np.uint8) for document in documents]

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:  # noqa: ARG002 - bytes are bytes
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return (decoder.decode(bytes([token])) for token in ids)

    def to_json(self) -> str:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # The library writes bytes as characters: those that can be seen as themselves, the others from 256 on. The
        # separator, which no text holds, is a token by its usual name instead.
        seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
        unseen = iter(range(256, 512))
        vocabulary = {chr(byte if byte in seen else next(unseen)): byte for byte in range(256)}
        vocabulary = {token: byte for token, byte in vocabulary.items() if byte != self.separator}
        tokenizer = Tokenizer(models.BPE(vocabulary | {END_OF_TEXT[0]: self.separator}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore
        tokenizer.add_special_tokens([END_OF_TEXT[0]])
        return tokenizer.to_str()


class FileTokenizer:
    """A JSON file of the `tokenizers` library, which encodes the documents of a batch in parallel threads.

    `RAYON_NUM_THREADS` limits them; their number changes no token. No special tokens are added but those
    that begin and end a document.
    """

    def __init__(self, path: Path, begin_of_text: str | None = None, end_of_text: str | None = None):
        import tokenizers

        self.path = str(path)
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"data.tokenizer={str(path)!r}: is not a JSON file of the tokenizers library ({one_line(error)})"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        known = [token for token in ((end_of_text,) if end_of_text else END_OF_TEXT) if token in vocabulary]
        if end_of_text:
            require(bool(known), "data.end_of_text", end_of_text, f"the tokenizer {str(path)!r} has no such token")
        require(
            bool(known),
            "data.tokenizer",
            str(path),
            f"has none of the tokens {' '.join(END_OF_TEXT)}; name the one that ends a document by data.end_of_text",
        )
        if begin_of_text:
            known_begin = begin_of_text in vocabulary
            require(known_begin, "data.begin_of_text", begin_of_text, f"the tokenizer {str(path)!r} has no such token")
        self.begin = vocabulary[begin_of_text] if begin_of_text else None
        self.separator = vocabulary[known[0]]
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        try:
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # as above: for instance of an unknown token that is not in the vocabulary
            raise ValueError(f"data.tokenizer={self.path!r}: cannot encode the text ({one_line(error)})") from None
        return [np.array(e.ids, np.uint32) for e in encoded]

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(list(after))
        return (piece for token in ids if (piece := stream.step(self.tokenizer, token)) is not None)

    def to_json(self) -> str:
        return json.dumps(json.loads(self.tokenizer.to_str()) | {"post_processor": None}, ensure_ascii=False)
