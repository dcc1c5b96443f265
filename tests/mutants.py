"""Mutation test of the core: how many of 200 small faults, drawn once with a fixed seed, do its tests find?

They are in docs/results/mutants.json, drawn with cosmic-ray by this file of the commit that is named there. Each is
tried in a clone of a commit, one after the other, and what became of it is noted there; the same command resumes. A
mutant whose lines have changed since it was drawn is skipped.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs/results/mutants.json"
GROUPS = {
    "attention": "tests/attention",
    "kernels": "tests/kernels/test_api.py tests/kernels/test_chunked.py tests/kernels/test_reference.py "
    "tests/kernels/test_varlen.py tests/kernels/test_rules.py tests/kernels/test_func.py tests/kernels/test_cpu.py",
    "statistics": "tests/table",
    "store": "tests/grid/test_grid.py tests/grid/test_plan.py tests/grid/test_packed.py "
    "tests/grid/test_state_machine.py tests/command/test_odd_names.py",
    "keys and checkpoints": "tests/config/test_key.py tests/training/test_checkpoints.py tests/training/test_run.py",
}
"""The tests that are to find the faults of each group."""
SLOWEST = 5.0
"""Times the tests of a group may take as long as without a fault; a mutant that exceeds them is found."""


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
    command = [python, "-m", "pytest", "-q", "-x", "-m", "not long and not gpu", *GROUPS[group].split()]
    paths = os.pathsep.join([str(clone), str(clone / "kernels")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "found: too slow"
    return "" if done.returncode == 0 else "found"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clone", type=Path, required=True, help="folder of the clone that is changed")
    parser.add_argument("--commit", default="HEAD")
    options = parser.parse_args()
    said = subprocess.run(["git", "rev-parse", "--short=8", options.commit], capture_output=True, text=True, cwd=ROOT)
    run(options.clone, said.stdout.strip())
