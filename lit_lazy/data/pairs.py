"""Tokens that hold a key and a value at once, for tasks that one layer of attention can solve."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Ids = TypeVar("Ids", int, np.ndarray)


@dataclass(frozen=True)
class Pairs:
    """Token ids: a pair of key k and value v is k * values + v; queries for a key follow, then the answers.

    There are as many answers as values, and last `null`, which says that there is none.
    """

    keys: int
    values: int

    def encode_pair(self, key: Ids, value: Ids) -> Ids:
        """The token that holds both."""
        return key * self.values + value

    def encode_query(self, key: Ids) -> Ids:
        """The token that asks for the value of a key."""
        return self.keys * self.values + key

    def encode_answer(self, value: Ids) -> Ids:
        """The token that names a value; never in a sequence."""
        return self.keys * (self.values + 1) + value

    @property
    def null(self) -> int:
        """The answer that no pair has the key."""
        return self.encode_answer(self.values)

    @property
    def vocab_size(self) -> int:
        """Pairs, queries and answers."""
        return self.null + 1
