"""The key of a cell: a hash of what is trained, stable as the project grows.

Fields at their default are omitted, so that a new option changes no key. `SCHEMA` is raised when a default or a meaning
changes. The code of custom classes is included, so an edited rule is another cell.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lit_lazy.config.checkpoint_file import read_checkpoint
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.config.schema import ModelConfig, RunConfig
from lit_lazy.config.serialisation import (
    UnknownClassError,
    flatten,
    from_dict,
    shorten_paths,
    to_dict,
)
from lit_lazy.config.user_classes import hash_user_code
from lit_lazy.support.disk import open_file
from lit_lazy.support.error_messages import describe_exception, explain
from lit_lazy.support.names_to_paths import suggest_file

SCHEMA = 2
"""Raised when a field's default or meaning changes: the same key would denote another training."""
_ABSENT = object()


def cell_key(config: RunConfig, fingerprint: str) -> str:
    """12 hex digits: hash of the settings, the code of custom classes and the data's fingerprint."""
    content = _describe(config) | {"data": fingerprint}
    if config.init_from is not None:
        del content["config"]["init_from"]  # the same weights at another path give the same run
        content["init_from"] = hash_model(config.init_from)
    if files := _hash_files(config.evaluations):
        content["files"] = files
    return _digest(content, digits=12)


def training_key(config: RunConfig, fingerprint: str) -> str:
    """The key of a cell without evaluations: cells that share it train the same model."""
    return cell_key(dataclasses.replace(config, evaluations=()), fingerprint)


def evaluation_key(evaluation: Evaluation) -> str:
    """12 hex digits: hash of an evaluation's settings, of the code of its custom classes and of its files."""
    return _digest(_describe(evaluation) | {"files": _hash_files([evaluation])}, digits=12)


def _describe(settings: RunConfig | Evaluation) -> dict[str, Any]:
    return {"schema": SCHEMA, "config": to_dict(settings, minimal=True), "code": hash_user_code(settings)}


def _hash_files(evaluations: Sequence[Evaluation]) -> list[str]:
    """The digest of every file that evaluations read."""
    files = [path for evaluation in evaluations for path in evaluation.files()]
    return [hash_file(str(path), "evaluations", "give files that can") for path in files]


def hash_file(path: str, option: str, fix: str) -> str:
    """The digest of an option's file. Raises a one-line ValueError if it cannot be read."""
    with explain(f"{option}={path!r}: cannot be read", fix, OSError):
        return _hash_file(path, *_identify(path))


@cache
def _hash_file(path: str, size: int, changed: int) -> str:  # noqa: ARG001 (keys of the cache)
    with open_file(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_model(path: str) -> str:
    """The digest of the model in a checkpoint: its weights, its settings and the code of its custom classes.

    What else the file holds does not count, so a version that adds a setting changes no key. Raises a one-line
    ValueError if it cannot be read.
    """
    try:
        return _hash_model(path, *_identify(path))
    except OSError as error:
        fix = suggest_file(path, "give a final.ckpt")
        raise ValueError(f"init_from={path!r}: cannot be read ({error.strerror}); {fix}") from None
    except UnknownClassError as error:
        fix = "import the file that defines it in that of the experiment"
        raise ValueError(f"init_from={path!r}: {error.needs}; {fix}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, ValueError) else describe_exception(error)
        raise ValueError(f"init_from={path!r}: {problem}; give a final.ckpt") from None


@cache
def _hash_model(path: str, size: int, changed: int) -> str:  # noqa: ARG001 (keys of the cache)
    content = read_checkpoint(Path(path))
    model = from_dict(ModelConfig, content["hyper_parameters"]["config"]["model"])
    weights = {
        name: [str(x.dtype), list(x.shape), hashlib.sha256(x.reshape(-1).view(torch.uint8).numpy()).hexdigest()]
        for name, x in content["state_dict"].items()
    }
    settings = {"model": to_dict(model, minimal=True), "code": hash_user_code(model)}
    return _digest({"weights": weights, **settings}, digits=64)


def _identify(path: str) -> tuple[int, int]:
    """Size and time of the last change of a file, by which its digest is cached."""
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def settings_key(config: RunConfig) -> str:
    """6 hex digits: hash of the settings only, for overridden experiments whose changes are too long for a name."""
    return _digest({"schema": SCHEMA, "config": to_dict(config, minimal=True)}, digits=6)


def list_changes(experiment: RunConfig, overridden: RunConfig) -> dict[str, Any]:
    """The settings that an overridden experiment has and the other lacks, by the shortest name that no other field has.

    Configs with equal settings have equal changes, and only those. The fields of another class are compared with its
    defaults.
    """
    before, after = flatten(to_dict(experiment, minimal=True)), flatten(to_dict(overridden, minimal=True))
    known = flatten(to_dict(overridden))
    changed = {path for path in after.keys() | before.keys() if after.get(path, _ABSENT) != before.get(path, _ABSENT)}
    names = shorten_paths(known)
    return {names[path]: value for path, value in known.items() if path in changed}


def _digest(content: dict[str, Any], digits: int) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:digits]
