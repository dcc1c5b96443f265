"""Main effects and interactions of factorial designs."""

import itertools

import pytest

from lit_lazy.table.designs import MOST_LEVELS, interactions, main_effects


def design(*levels):
    return {" ".join(point): dict(zip("ab", point, strict=True)) for point in itertools.product(*levels)}


def test_it_is_the_effect_of_an_additive_table_whatever_is_missing():
    whole = design(("p", "q", "r"), ("x", "y", "z"))
    values = {name: {"p": 1.0, "q": 3.0, "r": 7.0}[at["a"]] + {"x": 0.0, "y": 10.0, "z": 30.0}[at["b"]]
              for name, at in whole.items()}  # fmt: skip
    for missing in ("p y", "q x", "r z"):
        kept = {name: at for name, at in whole.items() if name != missing}
        effects = {c.name: sum(w * values[row] for row, w in c.weights.items()) for c in main_effects(kept)}
        assert effects == pytest.approx({"a: q - p": 2, "a: r - p": 6, "b: y - x": 10, "b: z - x": 30})


def test_interactions_are_zero_in_an_additive_table_and_found_where_they_are():
    """Values 10 if a and b are both at their second level, plus anything additive; one point is missing."""
    whole = {" ".join(at): dict(zip("abc", at, strict=True)) for at in itertools.product("pq", "xy", "uv")}
    del whole["q y v"]
    additive = {"p": 1, "q": 3, "x": 0, "y": 5, "u": 2, "v": 9}
    values = {name: sum(map(additive.get, at.values())) + 10 * (at["a"] == "q" and at["b"] == "y")
              for name, at in whole.items()}  # fmt: skip
    effects = {
        c.name.partition(":")[0]: sum(w * values[row] for row, w in c.weights.items()) for c in interactions(whole)
    }
    assert effects == {"a x b": 10, "a x c": 0, "b x c": 0}


def test_where_there_is_no_contrast():
    """Of levels that share no point, and of interactions of many levels."""
    nested = {name: at for name, at in design(("p", "q"), ("x", "y")).items() if name in ("p x", "q y")}
    assert main_effects(nested) == main_effects({}) == ()
    many = design([f"{i}" for i in range(MOST_LEVELS + 1)], ("x", "y"))
    assert (interactions(many), len(main_effects(many))) == ((), MOST_LEVELS + 1)
