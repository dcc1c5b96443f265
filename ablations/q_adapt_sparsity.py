"""Does a trained model become sparser than chance under Elastic-Softmax? SmolLM2-135M after 102,400 tokens."""

from q_adapt_loss import continued

from lit_lazy.grid.question import Question
from lit_lazy.table.records import Contrast

question = Question(
    ablation=continued("q_adapt_sparsity"),
    claim="Given Elastic-Softmax, with or without a bias, a trained model has more zeros than Gaussian scores of its "
    "spread would give.",
    primary="sparsity/over_null",
    contrasts=tuple(Contrast(name, {name: 1}) for name in ("elastic ramped", "lazy")),
    rule="higher",
    margin=0.02,
    source="adapting a trained model",
    looks=(10, 20, 40),
)
