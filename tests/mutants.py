"""Mutation test of the core: how many of 200 small faults, drawn once with a fixed seed, do its tests find?

`sample` draws them with cosmic-ray, which needs an environment of its own, into docs/results/mutants.json. `run` tries
each in a clone of a commit, one after the other, and notes there what became of it; the same command resumes. A mutant
whose lines have changed since it was drawn is skipped.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from difflib import unified_diff
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/results/mutants.json"
SEED, EACH = 0, 40
GROUPS = {
    "attention": (["lit_lazy/attention/*.py"], "tests/attention"),
    "kernels": (
        ["kernels/flash_lazy/*.py"],
        "tests/kernels/test_api.py tests/kernels/test_chunked.py tests/kernels/test_reference.py "
        "tests/kernels/test_varlen.py tests/kernels/test_rules.py tests/kernels/test_func.py tests/kernels/test_cpu.py",
    ),
    "statistics": (["lit_lazy/table/statistics.py", "lit_lazy/table/sequential_looks.py"], "tests/table"),
    "store": (
        [f"lit_lazy/grid/{name}.py" for name in ("cell_state", "plan", "run", "reused_results", "study", "worker")],
        "tests/grid/test_grid.py tests/grid/test_plan.py tests/grid/test_packed.py tests/grid/test_state_machine.py",
    ),
    "keys and checkpoints": (
        ["lit_lazy/config/key.py", "lit_lazy/training/checkpoints.py", "lit_lazy/training/run_folder.py"],
        "tests/config/test_key.py tests/training/test_checkpoints.py tests/training/test_run.py",
    ),
}
"""The modules, and the tests that are to find faults in them."""
SLOWEST = 5.0
"""Times the tests of a group may take as long as without a fault; a mutant that exceeds them is found."""


def sample() -> list[dict[str, str]]:
    """Draw the mutants: one at each of EACH random positions of every group."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import get_ast
    from cosmic_ray.mutating import MutationVisitor

    # Those of variables need a name to begin with.
    names = sorted(name for name in cosmic_ray.plugins.operator_names() if "Variable" not in name)
    drawn, rng = [], random.Random(SEED)
    for group, (patterns, _) in GROUPS.items():
        places: defaultdict[tuple[str, tuple[int, int]], list[tuple[str, int]]] = defaultdict(list)
        for path in sorted(file for pattern in patterns for file in ROOT.glob(pattern)):
            tree = get_ast(path.read_text())
            for name in names:
                operator, count = cosmic_ray.plugins.get_operator(name)(), 0
                for node in _walk(tree):
                    for position in operator.mutation_positions(node):
                        places[str(path.relative_to(ROOT)), position[0]].append((name, count))
                        count += 1
        for module, position in rng.sample(sorted(places), EACH):
            name, number = rng.choice(places[module, position])
            text = (ROOT / module).read_text()
            operator = cosmic_ray.plugins.get_operator(name)()
            mutated = MutationVisitor.mutate_code(text, operator, number)
            before, after = (code.splitlines(keepends=True) for code in (text, mutated))
            patch = "".join(unified_diff(before, after, f"a/{module}", f"b/{module}"))
            drawn.append({"group": group, "operator": name, "patch": patch})
    return drawn


def _walk(node: Any) -> Any:
    """As cosmic-ray counts."""
    yield node
    for child in getattr(node, "children", ()):
        yield from _walk(child)


def run(clone: Path, commit: str) -> None:
    """Try every mutant of the file that this commit has not tried."""
    if not clone.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", commit], check=True)
        for built in ROOT.glob("kernels/flash_lazy/cpu/*.so"):
            shutil.copy(built, clone / built.relative_to(ROOT))
    content = json.loads(FILE.read_text())
    limits: dict[str, float] = {}
    for mutant in content["mutants"]:
        group, found = mutant["group"], mutant.setdefault("found", {})
        if commit in found:
            continue
        if group not in limits:
            begun = time.monotonic()
            if _test(clone, group, None):
                sys.exit(f"the tests of {group} fail without a fault")
            limits[group] = SLOWEST * (time.monotonic() - begun)
        apply = ["git", "-C", str(clone), "apply", "--whitespace=nowarn", "-"]
        if subprocess.run(apply, input=mutant["patch"], text=True, capture_output=True).returncode:
            found[commit] = "changed"
        else:
            try:
                found[commit] = _test(clone, group, limits[group]) or "survived"
            finally:
                subprocess.run(["git", "-C", str(clone), "checkout", "--quiet", "."], check=True)
        FILE.write_text(json.dumps(content, indent=1) + "\n")
        counts = Counter(one.get("found", {}).get(commit, "left") for one in content["mutants"])
        print(group, found[commit], dict(counts), flush=True)


def _test(clone: Path, group: str, limit: float | None) -> str:
    """Run the tests of a group; returns how a fault was found, "" if none was."""
    python = shutil.which("python") or sys.executable
    command = [python, "-m", "pytest", "-q", "-x", "-m", "not long and not gpu", *GROUPS[group][1].split()]
    paths = os.pathsep.join([str(clone), str(clone / "kernels")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "found: too slow"
    return "" if done.returncode == 0 else "found"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["sample", "run"])
    parser.add_argument("--clone", type=Path, help="folder of the clone that is changed")
    parser.add_argument("--commit", default="HEAD")
    options = parser.parse_args()
    said = subprocess.run(["git", "rev-parse", "--short=8", options.commit], capture_output=True, text=True, cwd=ROOT)
    commit = said.stdout.strip()
    if options.action == "sample":
        made = {"command": "python tests/mutants.py sample", "commit": commit, "cosmic_ray": version("cosmic-ray")}
        FILE.write_text(json.dumps({**made, "seed": SEED, "mutants": sample()}, indent=1) + "\n")
    else:
        run(options.clone, commit)
