"""Token ids for tasks that one attention layer can solve: one token holds a key together with its value."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Ids = TypeVar("Ids", int, np.ndarray)


@dataclass(frozen=True)
class PairVocabulary:
    """Token ids: the pair of key k and value v is k * values + v; then the queries, one per key, then the answers.

    There is one answer per value, and a last one, `null`, for a key that has no pair.
    """

    keys: int
    values: int

    def encode_pair(self, key: Ids, value: Ids) -> Ids:
        """Token that holds the key and its value."""
        return key * self.values + value

    def encode_query(self, key: Ids) -> Ids:
        """Token that asks for the value of a key."""
        return self.keys * self.values + key

    def encode_answer(self, value: Ids) -> Ids:
        """Target that names a value; it never occurs in a sequence."""
        return self.keys * (self.values + 1) + value

    @property
    def null(self) -> int:
        """Answer to a query whose key has no pair."""
        return self.encode_answer(self.values)

    @property
    def vocab_size(self) -> int:
        """Number of pairs, queries and answers."""
        return self.null + 1
