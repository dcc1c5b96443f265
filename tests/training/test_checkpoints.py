"""Checkpoints and other files are written atomically, and checkpoints are validated before use."""

import errno
import io
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_lazy.attention import Elastic, LearnedBias
from lit_lazy.config import checkpoint_file
from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.config.serialisation import replace_at, to_dict
from lit_lazy.config.user_files import load_experiment
from lit_lazy.support.disk import is_disk_full, write_atomically, write_text
from lit_lazy.support.names_to_paths import find
from lit_lazy.training.checkpoints import AtomicCheckpointIO, find_resume_step, load
from lit_lazy.training.module import LitLM

LAZY = replace_at(
    load_experiment(find("experiments", "backcopy_tiny")),
    {"model.attention.normaliser": Elastic(), "model.attention.bias": LearnedBias()},
)


def module_of(cfg=LAZY):
    return LitLM.create(cfg, 17, 16)


def checkpoint(cfg=LAZY, step=3):
    """The parts of Lightning's checkpoint that matter here."""
    module = module_of(cfg)
    hyper_parameters = {"config": to_dict(cfg), "vocab_size": 17, "context_length": 16}
    return {"state_dict": module.state_dict(), "hyper_parameters": hyper_parameters, "global_step": step}


def save(path, content):
    AtomicCheckpointIO().save_checkpoint(content, path)


class TestWriting:
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=repr)
    def test_what_ends_the_writing_is_known_and_the_former_checkpoint_is_left(self, error, tmp_path, monkeypatch):
        """Torch's archive turns both into a RuntimeError, and the cell would fail or stop for a wrong reason."""

        class Broken(io.BytesIO):
            writes = 0

            def write(self, data):
                self.writes += 1
                if self.writes == 4:
                    raise error
                return super().write(data)

        path, torch_save = tmp_path / "last.ckpt", torch.save
        save(path, checkpoint())
        former = path.read_bytes()
        monkeypatch.setattr(torch, "save", lambda content, _: torch_save(content, Broken()))
        with pytest.raises((RuntimeError, KeyboardInterrupt)) as failed:
            save(path, checkpoint(step=6))
        assert isinstance(failed.value, KeyboardInterrupt) or is_disk_full(failed.value)
        assert path.read_bytes() == former
        assert os.listdir(tmp_path) == ["last.ckpt"]

    @pytest.mark.parametrize("fails", ["write", "fsync", "replace"])
    def test_a_file_is_whole_or_the_former(self, fails, tmp_path, monkeypatch):
        path = tmp_path / "file"
        write_text(path, "first")

        def fail(*_):
            assert path.read_text() == "first"
            raise OSError(errno.EIO, "broken")

        def write(file):
            file.write(b"second")
            file.flush()
            assert path.read_text() == "first"
            if fails == "write":
                fail()

        if fails != "write":
            monkeypatch.setattr(os if fails == "fsync" else Path, fails, fail)
        with pytest.raises(OSError, match="broken"):
            write_atomically(path, write)
        assert path.read_text() == "first"
        assert os.listdir(tmp_path) == ["file"]


class TestReading:
    @pytest.mark.parametrize(
        "spoilt",
        [
            {"global_step": None},
            {"state_dict": {"model.embedding.weight": 3.0}},
            {"hyper_parameters": {"lr": 0.1}},
            {"hyper_parameters": ["config"]},
        ],
        ids=str,
    )
    def test_what_is_not_ours(self, spoilt, tmp_path):
        content = {name: value for name, value in (checkpoint() | spoilt).items() if value is not None}
        torch.save(content, tmp_path / "last.ckpt")
        with pytest.raises(ValueError, match="was not made by this project"):
            read_checkpoint(tmp_path / "last.ckpt")
        assert find_resume_step(tmp_path / "last.ckpt", LAZY, module_of()) == 0
        assert (tmp_path / "last.ckpt.damaged").exists()

    @pytest.mark.parametrize("kind", ["items", "text", "itself", "elements"])
    def test_what_stands_for_more_than_the_file_holds_is_refused(self, kind, tmp_path, monkeypatch):
        """References to one object cost a file nothing; a message about them, or a check of them, would never end."""
        if kind in ("items", "itself"):  # counting as far as the usual limit takes seconds
            monkeypatch.setattr(checkpoint_file, "MOST_ITEMS", 10**5)
        content = checkpoint()
        if kind == "elements":
            content["state_dict"]["model.embedding.weight"] = torch.zeros(1).expand(10**10)
        else:
            many: list[Any] = ["x" * 10_000] * 10_000 if kind == "text" else [0] * 10
            for _ in range(9 if kind == "items" else 0):
                many = [many] * 10
            if kind == "itself":
                many.append(many)
            content["hyper_parameters"]["config"]["model"]["d_model"] = many
        torch.save(content, tmp_path / "last.ckpt")
        assert (tmp_path / "last.ckpt").stat().st_size < 100_000
        with pytest.raises(ValueError, match=r"stands for more than the file holds|was not made by this project"):
            read_checkpoint(tmp_path / "last.ckpt")

    def test_every_byte_of_a_weight_is_checked(self, tmp_path):
        """torch itself loads a weight with a flipped bit."""
        path, content = tmp_path / "final.ckpt", checkpoint()
        weight = content["state_dict"]["model.blocks.0.mlp.up.weight"]
        save(path, content)
        whole = path.read_bytes()
        start = whole.index(weight.numpy().tobytes())
        for at in (start, start + weight.numel() * 2, start + weight.numel() * 4 - 1):
            flipped = bytearray(whole)
            flipped[at] ^= 16
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match="bad checksum"):
                read_checkpoint(path)


def other_architecture():
    """Of the same config with changed code."""
    module = module_of()
    module.model.blocks[0].mlp.down = nn.Linear(32, 8, bias=False)
    return checkpoint() | {"state_dict": module.state_dict()}


@pytest.mark.parametrize(
    ("content", "size", "said"),
    [
        (checkpoint, None, None),
        *((checkpoint, size, "is no checkpoint, or damaged") for size in (0, 1, 1000, -1000, -1)),
        (lambda: checkpoint(replace(LAZY, seed=1)), None, "made by another config"),
        (other_architecture, None, "mlp.down.weight is (8, 32), should be (16, 32)"),
    ],
)
def test_a_run_resumes_from_a_whole_checkpoint_of_its_own(content, size, said, tmp_path, caplog):
    path = tmp_path / "last.ckpt"
    assert find_resume_step(path, LAZY, module_of()) == 0
    save(path, content())
    path.write_bytes(left := path.read_bytes()[:size])
    assert find_resume_step(path, LAZY, module_of()) == (0 if said else 3)
    (kept,) = tmp_path.iterdir()
    assert kept.name == ("last.ckpt.damaged" if said else "last.ckpt")
    assert kept.read_bytes() == left
    assert [said in record.getMessage() for record in caplog.records] == ([True] if said else [])


def test_a_checkpoint_of_an_earlier_version_loads_and_resumes(tmp_path):
    """Its missing, newer fields have their defaults."""
    path = tmp_path / "last.ckpt"
    content = checkpoint()
    del content["hyper_parameters"]["config"]["model"]["embedding_init_std"]
    save(path, content)
    assert load(path).cfg == LAZY
    assert find_resume_step(path, LAZY, module_of()) == 3
    other = replace_at(LAZY, {"model.embedding_init_std": 1.0})
    assert find_resume_step(path, other, module_of(other)) == 0
    assert (tmp_path / "last.ckpt.damaged").exists()
