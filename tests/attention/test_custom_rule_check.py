"""A rule that violates its contract fails with one line, naming rule and fix, before anything is created."""

import re
import sys
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

from lit_lazy.attention import AttentionCall, Normaliser, NormaliserModule, Softpick
from lit_lazy.testing import check_normaliser

LIT_LAZY = str(Path(sys.executable).with_name("lit-lazy"))


def module(weights, parameter=False, **declared):
    weights.__name__ = "weights"
    made = type("Mine", (NormaliserModule,), {"weights": weights, **declared})()
    if parameter:
        made.scale = nn.Parameter(torch.ones(1))
    return made


def plain(self, scores, rows):  # noqa: ARG001
    return scores.softmax(-1)


BROKEN = {
    "shape": (module(lambda _, s, _rows: s.softmax(-1).sum(-1)), "Mine.weights returns torch.float32 [2, 2, 4] for"),
    "dtype": (module(lambda _, s, _rows: s.softmax(-1).double()), "return torch.float32 [2, 2, 4, 7]"),
    "overflow": (module(lambda _, s, _rows: s.exp() / s.exp().sum(-1, keepdim=True)), "subtract the row's maximum"),
    "hidden": (module(lambda _, s, _rows: s.sigmoid() + 0.1), "gives a hidden key weight; clear it with masked_fill"),
    "counts hidden": (module(lambda _, s, _rows: s.relu() / s.shape[-1]), "depends on the number of hidden keys"),
    "negative": (module(lambda _, s, rows: s.where(rows.visible, 0)), "gives a weight below 0; declare signed = True"),
    "zeros": (module(lambda _, s, rows: s.relu() / rows.n), "a visible key a weight of 0; declare can_zero = True"),
    "in place": (module(lambda _, s, _rows: s.mul_(2).softmax(-1)), "Mine.weights changes its scores in place; use"),
    "maps": (module(plain, maps=3), "Mine.maps=3: must be a whole number that divides the head dimension 4"),
    "rows of maps": (
        module(lambda _, s, rows: s.softmax(-1)[:, :, 0].masked_fill(~rows.visible, 0), maps=2),
        "with several maps, the fields of rows have one more axis: use rows.visible.squeeze(2)",
    ),
    "looks ahead": (
        module(lambda _, s, _rows: s.relu() * (s.amax(-2, keepdim=True) > 1), can_zero=True),
        "Mine.weights depends on the other rows; compute each row from its own scores",
    ),
    "mean over the batch": (
        module(lambda _, s, rows: (s / s.where(rows.visible, 0).abs().mean(0, keepdim=True).amax()).softmax(-1)),
        "Mine.weights depends on the other sequences of the batch",
    ),
    "looks ahead in queries": (
        module(plain, queries=lambda _, call: call.q + call.q.mean(2, keepdim=True)),
        "lets a later token change an earlier row",
    ),
    "output": (module(plain, output=lambda _, out: out.mean(1)), "Mine.output returns [2, 7, 4] for heads"),
    "random": (
        module(lambda _, s, _rows: (s + torch.rand_like(s)).softmax(-1)),
        "gives other weights for the same scores; draw nothing at random in it",
    ),
    "no gradient": (module(plain, parameter=True), "Mine.scale gets no gradient: use it in weights, queries or output"),
    "detached scores": (
        module(lambda _, s, _rows: s.detach().softmax(-1)),
        "Mine passes no gradient to the scores, so queries and keys would learn nothing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_promise_is_named_at_the_first_call(case):
    broken, message = BROKEN[case]
    x = torch.zeros(1, 2, 3, 4)  # scores of zero break no rule
    with pytest.raises(ValueError, match=f"^.*{re.escape(message)}.*$"):
        broken(AttentionCall(x, x, x))


def test_signed_weights_and_idle_rows_are_no_mistake():
    x = torch.randn(1, 2, 3, 4)
    for kept in (
        module(lambda _, s, rows: s.where(rows.visible, 0), signed=True),
        module(lambda _, s, rows: 0 * s.where(rows.visible, 0), can_zero=True),
        module(lambda _, s, rows: (s / rows.position).where(rows.visible, 0), signed=True),
    ):
        kept(AttentionCall(x, x, x, key_mask=torch.tensor([[False, True, True]])))


def test_it_is_asked_once_and_leaves_the_global_generator_alone(monkeypatch):
    asked = module(plain)
    x = torch.zeros(1, 2, 3, 4)
    before = torch.get_rng_state()
    asked(AttentionCall(x, x, x))
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr(type(asked), "probe", lambda *_: pytest.fail("asked again"))
    asked(AttentionCall(x, x, x))


def test_check_normaliser_says_what_it_checked(capsys):
    class Leaky(Normaliser):
        def build(self, shape):  # noqa: ARG002
            return module(lambda _, s, _rows: s.softmax(-1) / (1 if s.shape[-2] < 6 else 2))

    with pytest.raises(AssertionError, match=r"^Leaky: blocks_equal_the_whole fails: "):
        check_normaliser(Leaky())
    check_normaliser(Softpick())
    assert capsys.readouterr().out.startswith("Softpick: 9 checks held: keeps its promises, is causal, blocks equal")


MINE = """
from lit_lazy.attention import Normaliser, NormaliserModule
from lit_lazy.config import experiment, replace_at

class Naive(Normaliser):
    def build(self, shape):
        return NaiveModule()

class NaiveModule(NormaliserModule):
    def weights(self, scores, rows):
        return scores.exp() / scores.exp().sum(-1, keepdim=True)

def config():
    return replace_at(experiment("backcopy_tiny"), {"model.attention.normaliser": Naive()})
"""


SLIPS = {
    "returns": ("return NaiveModule()", "return 3", "Naive.build returns a int; return a NormaliserModule"),
    "typo": ("return scores.exp() /", "return rows.visble /", "AttributeError (slip.py, line"),
    "overflow": ("", "", "lit-lazy: NaiveModule.weights is not finite for scores of size 200; subtract the row's"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_class_is_one_line_and_nothing_is_created(slip, tmp_path):
    right, wrong, message = SLIPS[slip]
    (tmp_path / "slip.py").write_text(MINE.replace(right, wrong) if right else MINE)
    done = forked.run([LIT_LAZY, "train", "slip.py", "--runs", "runs"], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert message in line
    assert not (tmp_path / "runs").exists()
