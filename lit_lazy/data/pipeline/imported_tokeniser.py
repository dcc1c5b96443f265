"""Tokenisers of imported models: made of a list of tokens and merges, and fitted to the model's embedding."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lit_lazy.data.pipeline.tokeniser import END_OF_TEXT, make_special
from lit_lazy.data.pipeline.tokeniser_trial import try_tokenizer
from lit_lazy.support.errors import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

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
    if begin is not None:
        template = processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, ids[begin])])
        tokenizer.post_processor = template  # type: ignore[assignment]
    return tokenizer.to_str()


def fit_to_embedding(content: str, words: int, special: Sequence[int]) -> str:
    """The tokeniser with a special token for each further id of an embedding of `words` rows.

    Published embeddings are often larger than their vocabulary. special: ids of tokens that are kept out of documents,
    unless a byte or a word of the text is such a token. Raises a one-line ValueError for an embedding that is smaller.
    """
    tokenizer = parse_tokenizer(content)
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
    tokenizer = parse_tokenizer(content)
    plain, framed = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    begin = tokenizer.id_to_token(framed[0]) if framed[:1] != plain[:1] else None
    if any(tokenizer.token_to_id(token) is not None for token in END_OF_TEXT):
        return begin, None
    if not ends:
        raise ValueError(f"eos_token_id=None: names no token, and the tokenizer has none of {' '.join(END_OF_TEXT)}")
    return begin, tokenizer.id_to_token(ends[0])


def parse_tokenizer(content: str) -> "Tokenizer":
    """Raises a one-line ValueError for what the library does not read, or not within limits."""
    from tokenizers import Tokenizer

    try:
        try_tokenizer(content.encode())
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises no narrower type
        raise ValueError(f"tokenizer.json: cannot be used ({one_line(error)})") from None
