"""Writes first-round.md from first-round.json.xz, the values of every seed: `python docs/results/first_round.py`.

Means are recomputed from the values and must be the recorded ones. Intervals are recorded: the rules that gave them are
in the code of the commit that the page names.
"""

import json
import lzma
from math import fsum, isclose
from pathlib import Path
from statistics import fmean
from typing import Any

HERE = Path(__file__).parent
OPENING = """\
# The first round

The first round tested fifteen questions with exactly five seeds each. Its rules used Welch's intervals; all rows of a
table shared one correlation over seeds. Four claims were refuted; eleven stayed undecided. Thirteen questions were
repeated with new seeds and looks ([verdicts](README.md)); the refuted q_length and q_null were not.

Commit 03268cd2 is the last that has this round's rules, questions and results.
`git show 03268cd2:docs/results/README.md` prints its results; `git checkout 03268cd2` restores everything. No training
was kept. [first-round.json.xz](first-round.json.xz) has every metric of every row and seed;
[first_round.py](first_round.py) makes this page. Means are recomputed; simultaneous intervals are the published ones.
`undecided: 11 seeds` says that 11 seeds would have sufficed if means and spreads had stayed the same. R1 to R15 are
[reviewers' questions](README.md#questions-of-the-reviewers); "via review" marks a quotation in a review.
"""


def read_questions() -> dict[str, dict[str, Any]]:
    """The questions by name."""
    return json.loads(lzma.decompress((HERE / "first-round.json.xz").read_bytes()))["questions"]


def compute_mean(question: dict[str, Any], contrast: dict[str, Any]) -> float:
    """The weighted sum of row means. Raises ValueError if it is not the recorded one."""
    values = {row["variant"]: row["values"][question["primary"]] for row in question["rows"]}
    mean = fsum(weight * fmean(values[row].values()) for row, weight in contrast["weights"].items())
    if not isclose(mean, contrast["mean"], rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(f"{contrast['name']}: the values have the mean {mean}, recorded is {contrast['mean']}")
    return mean


def format_page() -> str:
    return OPENING + "".join(map(_format_question, read_questions().items()))


def _format_question(named: tuple[str, dict[str, Any]]) -> str:
    name, question = named
    run, seeds = question["run"], question["seeds"]
    (column,) = (column for column in question["columns"] if column["key"] == question["primary"])
    lines = [
        f"\n## {name}\n",
        f"{question['claim']}\n",
        f"**{question['status'].capitalize()}**, n = {question['n']} on {question['base']}, "
        f"seeds {seeds[0]} to {seeds[-1]}. Primary outcome: {column['title']}; rule: {question['rule']}, margin "
        f"{question['margin']:g}. Source: {question['source']}. Declared in {question['commit']}, "
        f"run at {run['git_sha']}.\n",
        *(_format_contrast(question, contrast, column) for contrast in question["contrasts"]),
    ]
    return "\n".join(lines) + "\n"


def _format_contrast(question: dict[str, Any], contrast: dict[str, Any], column: dict[str, Any]) -> str:
    unit = " points" if column["unit"] == "%" else f" {column['unit']}".rstrip()
    spec = f"+.{column['digits']}f" if isinstance(column["digits"], int) else "+" + column["digits"]
    mean, low, high = (
        format(number * column["scale"], spec)
        for number in (compute_mean(question, contrast), contrast["low"], contrast["high"])
    )
    status, why = contrast["status"], contrast["why"].replace("it is above 0.3 otherwise", "softmax's is above 0.3")
    if status == "undecided":
        why = f"{contrast['needed']} seeds" if contrast["needed"] else ""
    rows = " - ".join(f"`{row}`" for row in contrast["name"].split(" - "))
    return f"- {rows}: {mean} [{low}, {high}]{unit}, {': '.join(filter(None, (status, why)))}"


if __name__ == "__main__":
    (HERE / "first-round.md").write_text(format_page(), encoding="utf-8")
