"""A joint search for the best tau_init, learning rate and RoPE base of Lazy Attention."""

from lit_lazy.attention import Elastic, LearnedBias
from lit_lazy.grid.search.definition import Real, Search

search = Search(
    name="lazy_search",
    base="backcopy",
    common={"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()},
    axes={
        "model.attention.normaliser.tau_init": Real(0.0, 2.0),
        "train.lr": Real(3e-4, 3e-2, log=True),
        "model.position.base": Real(1e2, 1e5, log=True),
    },
    objective="loss/val",
    trials=30,
)
