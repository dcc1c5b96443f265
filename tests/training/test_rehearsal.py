"""A user's part that would make a model wrong without a word is refused before anything is created."""

import dataclasses
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_lazy.attention import (
    Bias,
    BiasTerms,
    Gate,
    GateModule,
    Mixer,
    MixerModule,
    Normaliser,
    NormaliserModule,
    Position,
)
from lit_lazy.attention.bias import BiasModule
from lit_lazy.attention.position import PositionModule
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import replace_at
from lit_lazy.config.user_files import experiment
from lit_lazy.data.source_interface import SpecialTokens
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.export_folder import write
from lit_lazy.optim import Distillation, Optimiser, Schedule
from lit_lazy.training.check_before_run import prepare_outline
from lit_lazy.training.checkpoints import change_model
from lit_lazy.training.module import LitLM
from lit_lazy.training.rehearsal import rehearse

TINY = experiment("backcopy_tiny")
LATER, AGAIN = "later tokens change the logits", "a second pass gives other logits"
DECODED = "decoding with a cache gives other logits"


class OwnGate(GateModule):
    def __init__(self, gate):
        super().__init__()
        self.gate, self.w, self.τ = gate, nn.Parameter(torch.zeros(16)), nn.Parameter(torch.ones(1))

    def forward(self, out, x, v):  # noqa: ARG002
        return self.gate(self, out * self.τ, x)


GATES = {
    "": lambda self, out, x: out * self.w.sigmoid(),  # noqa: ARG005
    LATER: lambda self, out, x: out * (self.w + x.mean(1)).sigmoid()[:, None, None],
    "depend on the others of its batch": lambda self, out, x: out * (self.w + x.mean(0)).sigmoid(),
    AGAIN: lambda self, out, x: nn.functional.dropout(out * self.w.sigmoid()),  # noqa: ARG005
    "not finite at the start": lambda self, out, x: out / self.w,  # noqa: ARG005
    "in a rehearsal: AttributeError (layer.py": lambda self, out, x: None,  # noqa: ARG005
    "blocks.0.attention.gate.w get no gradient": lambda self, out, x: out * self.w.detach().sigmoid(),  # noqa: ARG005
}


@dataclasses.dataclass(frozen=True)
class OwnGated(Gate):
    said: str

    def build(self, shape):  # noqa: ARG002
        return OwnGate(GATES[self.said])


@dataclasses.dataclass(frozen=True)
class NoModule(Gate):
    def build(self, shape):  # noqa: ARG002
        return lambda out, x, v: out  # noqa: ARG005


class OwnRule(NormaliserModule):
    def __init__(self, hold):
        super().__init__()
        hold(self)

    def at_progress(self, progress):
        self.scale = self.scale * 0 + 1 + progress

    def weights(self, scores, rows):  # noqa: ARG002
        return (self.scale * scores).softmax(-1)


RULES = {
    "": lambda self: self.register_buffer("scale", torch.ones(())),
    "would go on otherwise": lambda self: setattr(self, "scale", 1.0),
    "would go on otherwise after a restart": lambda self: self.register_buffer("scale", torch.ones(()), False),
}


@dataclasses.dataclass(frozen=True)
class OwnScheduled(Normaliser):
    said: str

    def build(self, shape):  # noqa: ARG002
        return OwnRule(RULES[self.said])


class OwnPosition(PositionModule):
    def __init__(self, encode, relative):
        super().__init__()
        self.encode, self.relative = encode, relative

    def embed(self, x, offset, places=None):
        return x + self.encode(x, offset + torch.arange(x.shape[1]) if places is None else places)[..., None] / 16


POSITIONS = {
    "": lambda x, places: places,  # noqa: ARG005
    LATER: lambda x, places: places / x.shape[1],
    DECODED: lambda x, places: torch.arange(x.shape[1]),  # noqa: ARG005
    "declare relative = False": lambda x, places: places,  # noqa: ARG005
}


@dataclasses.dataclass(frozen=True)
class OwnEncoding(Position):
    said: str

    def build(self, d_model, head_dim, context_length):  # noqa: ARG002
        return OwnPosition(POSITIONS[self.said], relative="relative" in self.said)


class OwnBias(BiasModule):
    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, n_keys):
        return BiasTerms(table=self.compute(torch.arange(n_keys).float())[None])


BIASES = {
    "": lambda distances: -distances,
    LATER: lambda distances: distances / len(distances),
    AGAIN: torch.rand_like,
}


@dataclasses.dataclass(frozen=True)
class OwnTable(Bias):
    said: str

    def build(self, n_heads, context_length):  # noqa: ARG002
        return OwnBias(BIASES[self.said])


class OwnMixer(MixerModule):
    """Without a cache, so only trained."""

    rotary_dim = 16

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def backend_name(self, documents=False):  # noqa: ARG002
        return "own"

    def new_cache(self):
        raise NotImplementedError

    def flops_per_token(self, context_length):  # noqa: ARG002
        return 0

    def forward(self, x, inputs):  # noqa: ARG002
        return self.mix(x), None


MIXERS = {"": lambda x: x.cumsum(1), LATER: lambda x: x.flip(1).cumsum(1).flip(1), "RuntimeError": lambda x: x[..., 1:]}


@dataclasses.dataclass(frozen=True)
class OwnMix(Mixer):
    said: str

    def build(self, shape):  # noqa: ARG002
        return OwnMixer(MIXERS[self.said])


class Checking(torch.optim.SGD):
    """Reads the loss, a tensor as in a training."""

    def step(self, closure=None):
        assert torch.isfinite(closure())
        return super().step()


class Slowing(torch.optim.SGD):
    """Its state is an attribute."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


OPTIMISERS = {
    "would go on otherwise": Slowing,
    " ": Checking,
    "": lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]]),
    "are not in the optimiser's groups": lambda groups: torch.optim.SGD(groups[:1]),
    "'NoneType' object has no attribute": lambda groups: None,  # noqa: ARG005
    "SparseAdam does not": lambda groups: torch.optim.SparseAdam([p for group in groups for p in group["params"]]),
    "are not finite after a step": lambda groups: torch.optim.SGD(
        [group | {"lr": 1e38, "weight_decay": 1e6} for group in groups]
    ),
}


@dataclasses.dataclass(frozen=True)
class OwnOptimiser(Optimiser):
    said: str

    def build(self, groups, matrices, betas):  # noqa: ARG002
        return OPTIMISERS[self.said](groups)


SCHEDULES = {
    "": lambda progress: torch.tensor(1 - progress),
    "the schedule's factor at step 4=-0.5: must be": lambda progress: 0.5 - 2 * progress,
    "ZeroDivisionError (test_rehearsal.py": lambda progress: 1 / (1 - progress),
    "changes from call to call": lambda progress: torch.rand(1),  # noqa: ARG005
}


@dataclasses.dataclass(frozen=True)
class OwnSchedule(Schedule):
    said: str

    def factor(self, progress, final):  # noqa: ARG002
        return SCHEDULES[self.said](progress)


TERMS: dict[str, Any] = {
    "": torch.zeros(()),
    "distillation is nan": torch.tensor(torch.nan),
    "give a tensor with one": torch.zeros(2),
    "distillation is 0.5": 0.5,
}


@dataclasses.dataclass(frozen=True)
class OwnTerm(Distillation):
    said: str

    def compute(self, passes):  # noqa: ARG002
        return TERMS[self.said]


PARTS = {
    "model.attention.normaliser": (OwnScheduled, RULES),
    "model.attention.gate": (OwnGated, GATES),
    "model.position": (OwnEncoding, POSITIONS),
    "model.attention.bias": (OwnTable, BIASES),
    "model.mixer": (OwnMix, MIXERS),
    "train.optimiser": (OwnOptimiser, OPTIMISERS),
    "train.schedule": (OwnSchedule, SCHEDULES),
    "train.distillation": (OwnTerm, TERMS),
}
CASES = [(path, made, said) for path, (made, every) in PARTS.items() for said in every]


@pytest.mark.parametrize(("path", "made", "said"), CASES, ids=[f"{path} {said}" for path, _, said in CASES])
def test_a_users_part_is_tried_first(path: str, made: Any, said: str) -> None:
    cfg = replace_at(TINY, {path: made(said), "init_from": "any" if made is OwnTerm else None})
    with pytest.raises(ValueError, match=rf"^{made.__name__}: ") if said.strip() else nullcontext() as raised:
        rehearse(cfg, 16, documents=False)
    assert not said.strip() or said in str(raised.value)


def test_documents_are_rehearsed_where_they_are_apart() -> None:
    cfg = replace_at(TINY, {"model.attention.gate": OwnGated("")})
    rehearse(cfg, 16, documents=True)
    forgetful = replace_at(cfg, {"model.position": OwnForgetful()})
    rehearse(forgetful, 16, documents=False)
    with pytest.raises(ValueError, match="the logits of a document depend on the one before it"):
        rehearse(forgetful, 16, documents=True)


class WithoutPlaces(PositionModule):
    def embed(self, x, offset, places=None):  # noqa: ARG002
        return x + (offset + torch.arange(x.shape[1]))[:, None] / 16


@dataclasses.dataclass(frozen=True)
class OwnForgetful(Position):
    def build(self, d_model, head_dim, context_length):  # noqa: ARG002
        return WithoutPlaces()


@dataclasses.dataclass(frozen=True)
class Unbuilt(Position):
    def build(self, d_model, head_dim, context_length):  # noqa: ARG002
        raise RuntimeError("no table")


def outline(changes: dict[str, Any]) -> RunConfig:
    cfg = replace_at(TINY, changes)
    prepare_outline(cfg)
    return cfg


def test_each_training_with_a_users_part_is_rehearsed() -> None:
    outline({"model.attention.gate": OwnGated("")})
    for changes, said in (
        ({"model.attention.gate": OwnGated(LATER)}, LATER),
        ({"model.attention.gate": NoModule()}, "NoModule.build returns a function; return a GateModule"),
        ({"model.position": Unbuilt()}, "^model: RuntimeError .test_rehearsal.py, line .*: no table"),
        ({"train.schedule": OwnSchedule("changes from call to call")}, "changes from call to call"),
    ):
        with pytest.raises(ValueError, match=said):
            outline(changes)


def test_a_part_that_a_trained_model_is_given_is_rehearsed() -> None:
    trained = LitLM.create(TINY, 17, 16)
    change_model(trained, replace_at(TINY, {"model.attention.gate": OwnGated("")}))
    with pytest.raises(ValueError, match=LATER):
        change_model(trained, replace_at(TINY, {"model.attention.gate": OwnGated(LATER)}))


class Unheld(GateModule):
    def __init__(self, tensors):
        super().__init__()
        self.register_buffer("own", torch.ones(16), persistent=False)
        self.constants = tensors()

    def forward(self, out, x, v):  # noqa: ARG002
        return out * self.own


@dataclasses.dataclass(frozen=True)
class OwnUnheld(Gate):
    said: str

    def build(self, shape):  # noqa: ARG002
        return Unheld(UNHELD[self.said])


UNHELD = {
    "": lambda: torch.ones(16, device="cpu"),
    "Unheld.constants: is a tensor that is neither a parameter nor a buffer; use register_buffer": lambda: torch.ones(
        16
    ),
    "Unheld.constants: is a tensor": lambda: {"in": [torch.ones(16)]},
    "Unheld: cannot be built on the meta device (RuntimeError: ": lambda: torch.ones(()).item(),
}


@pytest.mark.parametrize("said", UNHELD)
def test_a_part_must_be_one_that_can_be_built_without_memory(said: str, tmp_path: Path) -> None:
    """As transformers builds an export, and this project a model whose weights are read later."""
    cfg = replace_at(TINY, {"model.attention.gate": OwnUnheld(said)})
    with pytest.raises(ValueError, match=f"^{re.escape(said)}") if said else nullcontext():
        prepare_outline(cfg)
    if said:
        with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
            write(tmp_path, DecoderLM(cfg.model, 17, 16, seed=0), "card", None, SpecialTokens())
        assert not [*tmp_path.iterdir()]
