"""Keys hidden in filler: an oracle finds all of them, a model that knows nothing none."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from subwords import bpe  # noqa: F401 - a fixture

from lit_lazy.config.schema import ModelConfig
from lit_lazy.data.backcopy import Backcopy
from lit_lazy.data.mqar import Mqar
from lit_lazy.data.pipeline.tokeniser import FileTokenizer
from lit_lazy.data.recall import Recall
from lit_lazy.data.stdlib import Stdlib
from lit_lazy.data.text import Text
from lit_lazy.data.token_dataset import IGNORED
from lit_lazy.measure.retrieval import FILLER, PASSKEY, Needle, Passkey, hide_in_symbols, hide_in_text
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.generation import Prompts

TINY = ModelConfig(d_model=8, n_heads=1, d_ff=8)
SIZES = {"depths": (0.0, 0.5, 1.0), "sequences": 4, "digits": 3, "seed": 1}
BACKCOPY = Backcopy(vocab_size=40, context_length=64, train_sequences=4, validation_sequences=6)
BYTES = Prompts(Stdlib(), 256)
MQAR = Mqar(vocab_size=64, context_length=64, pairs=4, train_sequences=4, validation_sequences=6)


class Copyist(DecoderLM):
    """Predicts what followed the latest place with the longest common past."""

    def compute_hidden(self, tokens, place=None, dropout_keys=None):  # noqa: ARG002
        same = tokens[:, :, None] == tokens[:, None, :]
        common = torch.zeros_like(same, dtype=torch.int64)
        for i in range(tokens.shape[1]):
            common[:, i, 0] = same[:, i, 0]
            if i:
                common[:, i, 1:] = (common[:, i - 1, :-1] + 1) * same[:, i, 1:]
        length = tokens.shape[1]
        common = common.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(), -1)
        rank = common * length + torch.arange(length)
        following = tokens.gather(1, (rank.argmax(-1) + 1).clamp(max=length - 1))
        return 30 * torch.nn.functional.one_hot(following, self.embedding.num_embeddings).float()


def build(kind, vocabulary, context=64):
    model = kind(TINY, vocabulary, context, seed=0)
    if kind is Copyist:
        model.head = torch.nn.Identity()
    return model


def read(batch, row):
    tokens = bytes(batch["tokens"][row].tolist()).decode()
    targets = batch["targets"][row]
    return tokens, bytes(targets[targets != IGNORED].tolist()).decode()


@pytest.mark.parametrize("length", [240, 400, 1000])
def test_a_passkey_is_where_its_depth_says_in_as_much_filler_as_fits(length):
    task = Passkey(**SIZES | {"digits": 5})
    batch = hide_in_text(BYTES, task, length)
    assert length - max(map(len, FILLER)) <= batch["tokens"].shape[1] <= length
    for number, depth in enumerate(task.depths):
        for row in range(4 * number, 4 * number + 4):
            text, key = read(batch, row)
            assert re.fullmatch("[1-9][0-9]{4}", key)
            opening, body, question = text.split("\n")
            assert opening == PASSKEY.opening
            assert question == f"{PASSKEY.question} {key[:-1]}"
            before, after = body.split(PASSKEY.hidden.format(key=key))
            sentences = [part.count(".") for part in (before, after)]
            assert sentences[0] == round(depth * sum(sentences))
            assert before + after.lstrip() == " ".join((FILLER * 30)[: sum(sentences)]) or depth == 1
    keys = [read(batch, row)[1] for row in range(12)]
    assert keys[:4] == keys[4:8] == keys[8:]
    assert len({*keys[:4]}) == 4


def test_a_needle_is_among_distractors_that_are_the_same_at_every_depth():
    batch = hide_in_text(BYTES, Needle(**SIZES), 500)
    for row in range(12):
        text, key = read(batch, row)
        named = dict(re.findall(r"The number of the (\w+) is (\d{3})\.", text))
        assert len(named) == 4
        (asked,) = re.findall(r"What is the number of the (\w+)\?", text)
        assert named[asked] == key
        assert named == dict(re.findall(r"The number of the (\w+) is (\d{3})\.", read(batch, row % 4)[0]))


def test_a_key_s_tokens_are_those_of_the_whole_text(bpe):  # noqa: F811
    tokenizer = FileTokenizer(bpe, begin_of_text="<s>")
    data = Text("nowhere", tokenizer=str(bpe), begin_of_text="<s>")
    batch = hide_in_text(Prompts(data, tokenizer.vocab_size), Passkey(**SIZES), 300)
    for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist(), strict=True):
        assert tokens[0] == tokenizer.begin
        answered = [i for i, target in enumerate(targets) if target != IGNORED]
        answer = [targets[i] for i in answered]
        text = "".join(tokenizer.decode(tokens[1 : answered[0] + 1] + answer))
        key = "".join(tokenizer.decode(answer)).strip()
        assert len(key) == 3
        assert text.endswith(f"The pass key is {key}")
        assert tokenizer.encode([text.encode()])[0].tolist() == tokens[1 : answered[0] + 1] + answer


@pytest.mark.parametrize("data", [Stdlib(), Text("nowhere")])
def test_a_prompt_begins_as_the_windows_of_the_training(data):
    task, model = Passkey((300,), **SIZES), build(DecoderLM, 256)
    plain, begun = (task._hide(model, replace(data, bos=bos), 300) for bos in (False, True))
    for name, first in (("tokens", 0), ("targets", IGNORED)):
        assert torch.equal(begun[name], torch.nn.functional.pad(plain[name], (1, 0), value=first))


@pytest.mark.parametrize(("data", "digits"), [(BACKCOPY, 3), (MQAR, 1)])
def test_symbols_are_hidden_behind_a_marker_that_is_nowhere_else(data, digits):
    source = data.load()
    task = Needle(**SIZES | {"digits": digits})
    batch = hide_in_symbols(source, task)
    tokens, targets = (batch[name].view(3, 4, -1).numpy() for name in ("tokens", "targets"))
    width = 1 + digits
    slots = (data.context_length - width) // width
    for row, depth in zip(tokens, task.depths, strict=True):
        for number, sequence in enumerate(row):
            marker, place = sequence[-digits], 1 + round(depth * (slots - 1)) * width
            assert np.flatnonzero(sequence[:-digits] == marker).tolist() == [place]
            key = targets[0, number, -digits:]
            assert sequence[place + 1 : place + width].tolist() == key.tolist()
            assert sequence[0] == source.validation[number * 6 // 4]["tokens"][0]
    assert (targets[..., :-digits] == IGNORED).all()
    assert (targets == targets[:1]).all()
    if data is MQAR:  # keys are asked for, values are answers
        assert (tokens[..., -1] < 32).all()
        assert (targets[..., -1] >= 32).all()


@pytest.mark.parametrize("data", [Stdlib(), BACKCOPY, MQAR])
@pytest.mark.parametrize("kind", [Passkey, Needle])
def test_an_oracle_finds_every_key_and_ignorance_none(data, kind):
    text = isinstance(data, Stdlib)
    lengths = (360, 420) if text else (48, 64)
    evaluation = kind(lengths, sequences=3, digits=5 if text else 3)
    vocabulary, name = data.load().vocab_size, kind.__name__.lower()
    oracle, ignorant = build(Copyist, vocabulary), build(DecoderLM, vocabulary)
    evaluation.check(oracle, data)
    found, missed = (evaluation.measure(model, data) for model in (oracle, ignorant))
    for what in ("accuracy", "loss"):
        for length in lengths:
            places = [missed[f"{name}/{what}_{length}_at_{depth}"] for depth in ("0", "0.25", "0.5", "0.75", "1")]
            assert missed[f"{name}/{what}_{length}"] == pytest.approx(np.mean(places))
        assert missed[f"{name}/{what}"] == pytest.approx(np.mean([missed[f"{name}/{what}_{n}"] for n in lengths]))
    assert len(missed) == len(found) == 2 * (1 + 2 + 2 * 5)
    assert all(value == 1.0 for metric, value in found.items() if "accuracy" in metric)
    assert all(value < 1e-9 for metric, value in found.items() if "loss" in metric)
    torch.nn.init.zeros_(ignorant.embedding.weight)
    missed = evaluation.measure(ignorant, data)
    assert missed[f"{name}/accuracy"] == 0
    assert missed[f"{name}/loss"] == pytest.approx(math.log(vocabulary))
    assert evaluation.measure(oracle, data) == found


@pytest.mark.parametrize(
    ("evaluation", "data", "message"),
    [
        (Passkey((100,)), Stdlib(), r"lengths=100: question and keys need 2\d\d tokens; choose a greater length"),
        (Needle((16,)), BACKCOPY, "lengths=16: has no room for 4 keys"),
        (Needle((35,)), BACKCOPY, "lengths=35: has distinct places for 4 of 5 depths; give 36 or more"),
        (Passkey((256,)), Stdlib(), "lengths=256: has distinct places for 4 of 5 depths; give about 263 or more"),
        (Passkey((256,)), Recall(), "Recall has no context_length to change"),
        (Passkey((64,)), Text(path="nowhere", tokenizer="nowhere.json"), r"data\.tokenizer='nowhere\.json'"),
    ],
)
def test_what_cannot_be_hidden_is_refused_in_a_line(evaluation, data, message):
    with pytest.raises(ValueError, match=f"^.*{message}.*$"):
        evaluation.check(build(DecoderLM, 41 if data is BACKCOPY else 256), data)
