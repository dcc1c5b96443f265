"""Does a trained model lose its sink under Elastic-Softmax? SmolLM2-135M after 65,536 tokens."""

from q_adapt_loss import ASKED, continued

from lit_lazy.grid.question import Question
from lit_lazy.table.declaration import Comparison, Statement

SINK, REMOVED = 0.3, 0.1
"""The control's sink rate exceeds the first; a sink is removed where the rate is below the second."""

question = Question(
    ablation=continued("q_adapt_sink"),
    claim="Given Elastic-Softmax, with or without a bias, or a gate, a trained model loses its sink: less than a tenth "
    "of heads and sequences have one where softmax keeps three tenths.",
    primary="sink/rate",
    contrasts=tuple(
        Statement(name, Comparison(name, "<", REMOVED), given=Comparison("softmax", ">", SINK)) for name in ASKED
    ),
    rule="mostly",
    source="adapting a trained model",
    looks=(10, 20, 40),
)
