"""Tokenisers: raw bytes, or a JSON file of the `tokenizers` library, also of an imported model."""

import codecs
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from lit_lazy.data.pipeline.tokeniser_trial import try_tokenizer
from lit_lazy.support.checked_fields import require
from lit_lazy.support.disk import open_file
from lit_lazy.support.error_messages import explain, one_line
from lit_lazy.support.names_to_paths import suggest_file

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""Tokens of single bytes, as the library's ByteFallback reads them: it decodes a run of them together."""
REPLACEMENT = "\ufffd"
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    """Turns documents into token ids."""

    vocab_size: int
    begin: int | None
    """Id before every document, or None."""
    separator: int
    """Id after every document."""

    def encode(self, documents: list[bytes], control: bool = False) -> list[np.ndarray]:
        """Ids of each document, without `begin` and `separator`.

        control: whether the text of a control token, such as `</s>`, becomes that token, as in a prompt; in a document
        it is text.
        """
        ...

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """Text of `ids`, which follow the ids `after`, piece by piece; an incomplete last character is dropped."""
        ...

    def to_json(self) -> str:
        """JSON of a `tokenizers` tokeniser that gives the same ids and adds no special tokens."""
        ...


@dataclass(frozen=True)
class TokenizerSpec:
    """Parameters of a tokeniser."""

    name: str
    """`BYTES`, or the path of a JSON file of the tokenizers library."""
    begin_of_text: str | None = None
    end_of_text: str | None = None
    control: bool = False
    """Whether documents may contain control tokens, see `Tokenizer.encode`."""

    @property
    def digest(self) -> str:
        """Digest of the file and the version of the library that reads it."""
        content = self.hash_file()
        return BYTES if content is None else f"{version('tokenizers')} {content}{' with control' * self.control}"

    def hash_file(self) -> str | None:
        """Digest of the file; None for bytes. Raises a one-line ValueError if it cannot be read."""
        return None if self.name == BYTES else hashlib.sha256(read_file(self.name)).hexdigest()

    def build(self) -> "ByteTokenizer | FileTokenizer":
        """Raises a one-line ValueError if the tokeniser cannot be loaded."""
        return ByteTokenizer() if self.name == BYTES else FileTokenizer(self.name, self.begin_of_text, self.end_of_text)


def read_file(name: str) -> bytes:
    """Content of a tokeniser's file. Raises a one-line ValueError if it cannot be read."""
    fix = suggest_file(name, "give 'bytes' or a JSON file of the tokenizers library")
    kinds = OSError, RuntimeError, ValueError, MemoryError
    with explain(f"data.tokenizer={name!r}: cannot be read", fix, *kinds), open_file(Path(name).expanduser()) as file:
        return file.read()


class ByteTokenizer:
    """Ids are bytes; NUL is the separator."""

    vocab_size = 256
    begin = None
    separator = 0

    def encode(self, documents: list[bytes], control: bool = False) -> list[np.ndarray]:  # noqa: ARG002 - bytes are bytes
        return [np.frombuffer(document, np.uint8) for document in documents]

    def count_lossy(self, documents: list[bytes], ids: list[np.ndarray]) -> int:  # noqa: ARG002
        return 0

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:  # noqa: ARG002 - bytes are bytes
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return (decoder.decode(bytes([token])) for token in ids)

    def to_json(self) -> str:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        # The library represents printable bytes by their characters, the others by those from 256 on. The separator,
        # which no text contains, becomes a special token with the usual name.
        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
        substitutes = iter(range(256, 512))
        vocabulary = {chr(byte if byte in printable else next(substitutes)): byte for byte in range(256)}
        vocabulary = {token: byte for token, byte in vocabulary.items() if byte != self.separator}
        tokenizer = Tokenizer(models.BPE(vocabulary | {END_OF_TEXT[0]: self.separator}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore
        tokenizer.add_special_tokens([END_OF_TEXT[0]])
        return tokenizer.to_str()


def make_special(tokenizer: "tokenizers.Tokenizer", ids: Sequence[int]) -> None:
    """Keep tokens out of documents: a file may declare them as ordinary words, which are found in a text."""
    from tokenizers import AddedToken

    added = tokenizer.get_added_tokens_decoder()
    for token in ids:
        if (known := added.get(token)) is None:
            known = AddedToken(tokenizer.id_to_token(token), normalized=False)
        known.special = True
        tokenizer.add_special_tokens([known])


class FileTokenizer:
    """JSON file of the `tokenizers` library, which encodes the documents of a batch in parallel threads.

    `RAYON_NUM_THREADS` limits the threads; their number affects no token. Only the begin and end tokens are added.
    """

    def __init__(self, path: str | Path, begin_of_text: str | None = None, end_of_text: str | None = None):
        self.path = str(path)
        self.tokenizer = parse_tokenizer(read_file(self.path), f"data.tokenizer={self.path!r}")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        for name, token in (("end_of_text", end_of_text), ("begin_of_text", begin_of_text)):
            missing = f"is no token of data.tokenizer={self.path!r}; choose one of its tokens"
            require(not token or token in vocabulary, f"data.{name}", token, missing)
        end_tokens = [token for token in ((end_of_text,) if end_of_text else END_OF_TEXT) if token in vocabulary]
        fix = f"has none of the tokens {' '.join(END_OF_TEXT)}; set data.end_of_text to the token that ends a document"
        require(bool(end_tokens), "data.tokenizer", self.path, fix)
        self.begin = vocabulary[begin_of_text] if begin_of_text else None
        self.separator = vocabulary[end_tokens[0]]
        make_special(self.tokenizer, [token for token in (self.begin, self.separator) if token is not None])
        self.vocab_size = max(vocabulary.values()) + 1

    def encode(self, documents: list[bytes], control: bool = False) -> list[np.ndarray]:
        texts = [document.decode() for document in documents]
        self.tokenizer.encode_special_tokens = not control
        with self._one_line_errors("encode the text"):
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(e.ids, np.uint32) for e in encoded]

    def _decode(self, batch: list[list[int]]) -> list[str]:
        with self._one_line_errors("decode tokens"):
            return self.tokenizer.decode_batch(batch, skip_special_tokens=False)

    @contextmanager
    def _one_line_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # such as a missing unknown token; a panic is no Exception
            problem = f"data.tokenizer={self.path!r}: cannot {action} ({one_line(error)})"
            raise ValueError(f"{problem}; use another tokenizer") from None

    def count_lossy(self, documents: list[bytes], ids: list[np.ndarray]) -> int:
        """How many documents are not restored by decoding, but for one space that some tokenisers add at the start."""
        texts = self._decode([text.tolist() for text in ids])
        pairs = zip(documents, texts, strict=True)
        return sum(document.decode().removeprefix(" ") != text.removeprefix(" ") for document, text in pairs)

    def decode(self, ids: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        shown, held = list(after), []
        for token in ids:
            held.append(token)
            # A later token changes the text of a run of bytes, or of an incomplete character, but nothing before it.
            if not BYTE.fullmatch(self.tokenizer.id_to_token(token) or ""):
                piece = self._continue(shown, held)
                if piece and not piece.endswith(REPLACEMENT):
                    yield piece
                    shown, held = held, []
        yield self._continue(shown, held).rstrip(REPLACEMENT)

    def _continue(self, shown: list[int], ids: list[int]) -> str:
        """What ids add to the text of the tokens before them."""
        before, text = self._decode([shown, shown + ids])
        return text[len(before) :]

    def to_json(self) -> str:
        return json.dumps(json.loads(self.tokenizer.to_str()) | {"post_processor": None}, ensure_ascii=False)


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LONGEST_NUMBER = {"llama-bpe": 3, "qwen2": 1}
"""Digits in a token, of the kinds of BPE that split text by `WORDS`."""
KINDS = ("smollm", *LONGEST_NUMBER)
"""Ways to split text before BPE, by llama.cpp's names."""


def build_bpe(
    tokens: Sequence[str], merges: Sequence[str], added: Mapping[str, bool], kind: str, begin: str | None
) -> str:
    """JSON of a byte-level BPE of the tokenizers library.

    tokens: by id. merges: pairs separated by a space. added: tokens that are found in the text before it is split, and
    whether they are special. kind: one of `KINDS`. begin: token before every text, or None. Raises a one-line
    ValueError for any other kind, or merges of unknown tokens.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    if kind not in KINDS:
        raise ValueError(f"tokenizer.ggml.pre={kind!r}: not known; there are {', '.join(KINDS)}")
    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    ids = {token: number for number, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=kind == "llama-bpe"))
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"tokenizer.ggml.merges: do not fit the tokens ({one_line(error)})") from None
    if kind == "smollm":
        split = pre_tokenizers.Digits(individual_digits=True)
    else:
        split = pre_tokenizers.Split(Regex(WORDS % LONGEST_NUMBER[kind]), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "smollm")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token, special in added.items()])
    return begin_texts(tokenizer.to_str(), None if begin is None else ids[begin])


def begin_texts(content: str, begin: int | None) -> str:
    """The JSON of a tokeniser of the `tokenizers` library that puts a token before every text; as it is for None."""
    from tokenizers import Tokenizer, processors

    if begin is None:
        return content
    tokenizer = Tokenizer.from_str(content)
    token = tokenizer.id_to_token(begin)
    template = processors.TemplateProcessing(f"{token} $A", special_tokens=[(token, begin)])
    tokenizer.post_processor = template  # type: ignore[assignment]
    return tokenizer.to_str()


def fit_to_embedding(content: str, words: int, special: Sequence[int]) -> str:
    """The tokeniser with a special token for each further id of an embedding of `words` rows.

    Published embeddings are often larger than their vocabulary. special: ids of tokens that are kept out of documents,
    unless a byte or a word of the text is such a token. Raises a one-line ValueError for an embedding that is smaller.
    """
    tokenizer = parse_tokenizer(content.encode())
    used = max(tokenizer.get_vocab().values(), default=-1) + 1
    if used > words:
        raise ValueError(f"the tokenizer has ids up to {used - 1}, the embedding only {words} rows")
    tokenizer.add_special_tokens([f"<|unused_{number}|>" for number in range(used, words)])
    make_special(tokenizer, [token for token in special if token in tokenizer.get_added_tokens_decoder()])
    if max(tokenizer.get_vocab().values()) != words - 1:  # it gives its first free ids, which are not always the last
        raise ValueError(f"the tokenizer has unused ids below {used}, and the embedding {words} rows")
    return tokenizer.to_str(pretty=True)


def find_ends(content: str, ends: Sequence[int]) -> tuple[str | None, str | None]:
    """The token before every text, and the one after it where the usual names are missing; None for none.

    ends: ids of the tokens that end a text by the model's settings. Raises a one-line ValueError if there is none.
    """
    tokenizer = parse_tokenizer(content.encode())
    plain, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    begin = tokenizer.id_to_token(framed[0]) if framed[:1] != plain[:1] else None
    if any(tokenizer.token_to_id(token) is not None for token in END_OF_TEXT):
        return begin, None
    if not ends:
        raise ValueError(f"eos_token_id=None: names no token, and the tokenizer has none of {' '.join(END_OF_TEXT)}")
    return begin, tokenizer.id_to_token(ends[0])


def parse_tokenizer(content: bytes, name: str = "tokenizer.json") -> "tokenizers.Tokenizer":
    """Raises a one-line ValueError for what the library does not read, or not within limits."""
    from tokenizers import Tokenizer

    fix = "give a JSON file of the tokenizers library"
    with explain(f"{name}: cannot be used", fix, Exception):  # the library raises no narrower type
        try_tokenizer(content)
        return Tokenizer.from_buffer(content)
