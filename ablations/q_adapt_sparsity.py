"""Does a trained model become sparser than chance under Elastic-Softmax? SmolLM2-135M after 65,536 tokens."""

from q_adapt_loss import continued

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

LEAST = 0.02
"""Two points."""

question = Question(
    ablation=continued("q_adapt_sparsity"),
    claim="Given Elastic-Softmax, with or without a bias, a trained model is at least two points sparser than Gaussian "
    "scores of its spread would be.",
    primary="sparsity/over_null",
    contrasts=tuple(Statement(name, Comparison(name, ">", LEAST)) for name in ("elastic ramped", "lazy")),
    rule="mostly",
    source="adapting a trained model",
    looks=(10, 20, 40),
)
