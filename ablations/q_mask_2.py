"""Does the sink follow a fixed token (the paper's Figure 2)? BOS at four places. Second attempt, with looks."""

from dataclasses import replace

from q_mask import ON_BOS, POSITIONS
from q_mask import question as first

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

SINK, REMOVED = 0.1, 0.25
"""A sink weighs more than the first; it is removed where less than the second of it is left."""


def removed(name: str, row: str, of: str) -> Statement:
    """That a row has less than a quarter of the sink that another has."""
    return Statement(name, Comparison(row, "<", REMOVED, of), given=Comparison(of, ">", SINK))


question = Question(
    ablation=replace(first.ablation, name="q_mask_2", seeds=tuple(range(100, 180))),
    claim="Wherever BOS stands softmax has a sink on it, of which Elastic-Softmax leaves less than a quarter.",
    primary=ON_BOS,
    contrasts=tuple(removed(f"BOS at {place}", f"elastic at {place}", f"softmax at {place}") for place in POSITIONS),
    rule="mostly",
    margin=REMOVED,
    source="the paper's Figure 2 (via review)",
    looks=(10, 20, 40, 80),
    after="q_mask",
)
