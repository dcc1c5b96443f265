"""My normaliser: the rule that turns a row of scores into weights; this one is Softpick (arXiv 2504.20966).

`lit-lazy train my_normaliser.py` trains it; `lit_lazy.testing.check_normaliser(MyNormaliser())` checks all else.
"""

from lit_lazy.attention import Normaliser, NormaliserModule
from lit_lazy.config import experiment


class MyNormaliser(Normaliser):
    # For settings, make it a `@dataclass(frozen=True)` with fields; each is then an option,
    # --model.attention.normaliser.FIELD. `first_values = ("FIELD",)` names those that are only initial values of
    # parameters: to change one on a trained model, which has its own values, is then an error.
    def build(self, shape):  # shape.n_heads, .head_dim, .context_length, ... for a module with parameters
        return MyNormaliserModule()


class MyNormaliserModule(NormaliserModule):
    can_zero = True  # whether weights can be exactly 0, so that sparsity is measured

    def weights(self, scores, rows):
        """Scores `[B, H, R, C]`, float32, to weights of the same shape; 0 where `rows.visible` is False."""
        # Change from here on. `rows.n` is the number of keys that a row sees, `rows.position` its place.
        top = scores.amax(-1, keepdim=True).clamp(min=0)  # nothing overflows
        e = ((scores - top).exp() - (-top).exp()).masked_fill(~rows.visible, 0)
        return e.relu() / (e.abs().sum(-1, keepdim=True) + 1e-8)


def config():
    # The experiment to train it in, with further changes by dotted path; this one takes seconds.
    return experiment("backcopy_small", {"model.attention.normaliser": MyNormaliser()})
