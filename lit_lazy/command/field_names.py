"""Finds misspelt fields in the source of the settings: to import it takes torch, which takes seconds."""

import ast
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

SCHEMA = Path(__file__).parents[1] / "config" / "schema.py"
GROUPS = {"": "RunConfig", "model": "ModelConfig", "train": "TrainConfig"}
FIX = "`lit-lazy fields EXPERIMENT` lists the fields, --help the options"


def check_field_names(overrides: Sequence[str], options: Iterable[str] = ()) -> None:
    """Raise a one-line ValueError for what is nearly a field of a run, its model or its training, or an option.

    options: those of the command, as `--name`. `apply_overrides` says the same of fields, and checks those of parts.
    """
    classes = ast.parse(SCHEMA.read_text(encoding="utf-8")).body if overrides else []
    fields = {
        node.name: [ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)]
        for node in classes
        if isinstance(node, ast.ClassDef)
    }
    for word, following in zip(overrides, [*overrides, ""][1:], strict=True):
        path, equals, value = word.partition("=")
        parts = path.removeprefix("--").split(".")
        place = int(parts[0] in ("model", "train") and len(parts) > 1)
        known = fields[GROUPS["".join(parts[:place])]]
        if not word.startswith("--") or parts[place] in known:
            continue
        if len(parts) == 1 and (nearly := get_close_matches(path, options, n=1, cutoff=0.8)):
            raise ValueError(f"{path}: no such option or field (did you mean {nearly[0]}?); {FIX}")
        for name in get_close_matches(parts[place], known, n=1):
            meant = ".".join([*parts[:place], name, *parts[place + 1 :]])
            given = value if equals else following
            raise ValueError(f"{path}={given!r}: no such field (did you mean --{meant}?); {FIX}")
        if nearly := get_close_matches(f"--{parts[-1]}", options, n=1, cutoff=0.8):
            raise ValueError(f"{path}: no such field (did you mean the option {nearly[0]}?); {FIX}")
