"""Function names are verbs: lists those that begin with a participle and limits their number.

`python tests/test_names.py` prints the list.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("lit_lazy", "kernels/flash_lazy", "kernels/bench", "kernels/examples", "timings")
MOST = 20
IRREGULAR = re.compile(
    "begun|bound|built|chosen|cut|drawn|found|given|held|hidden|kept|known|left|lost|made|meant|sent|shown|spent|split"
    "|spread|struck|taken|told|thrown|worn|written"
)
BASE_FORMS = frozenset(("bed", "embed", "feed", "need", "seed", "shed", "speed", "cut", "split", "spread", "need"))
"""Verbs and nouns that only look like participles."""


def is_participle(name: str) -> bool:
    """Whether a name's first word is a past participle: `made`, `_asked`, `loaded_once`."""
    first = name.lstrip("_").partition("_")[0]
    if first in BASE_FORMS:
        return False
    return bool(IRREGULAR.fullmatch(first) or re.fullmatch(r"[a-z]{2,}ed", first))


def participles() -> Iterator[str]:
    """`file:line name` of each function, except properties, whose name begins with a participle."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and is_participle(node.name) and not _is_property(node):
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def _is_property(node: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_functions_are_verbs() -> None:
    found = list(participles())
    assert len(found) <= MOST, "\n".join(found)


def test_a_participle_is_recognised() -> None:
    assert all(map(is_participle, ("made", "_asked", "loaded_once", "shown")))
    assert not any(map(is_participle, ("make", "embed", "read", "split_parts", "ed", "feed_forward")))


if __name__ == "__main__":
    print(*participles(), sep="\n")
