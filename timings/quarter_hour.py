"""What a GPU is asked in fifteen minutes: are the kernels right, how fast are they, and do the commands run there.

    PYTHONPATH=.:kernels:tests/kernels python3 -m timings.quarter_hour --out FOLDER

Phases with limits of time, the most informative first; what runs at once in a phase is killed at its limit. FOLDER has
quarter-hour.md and .json, rewritten after every process, and each process' log and figures. Needs torch, triton, numpy
and pytest; the commands need the packages of lit-lazy. `--tiny` rehearses it on a CPU: benchmarks that need a GPU then
only read their arguments.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from timings.results import collect_provenance, format_provenance, format_row

PROGRAM = "timings.quarter_hour"
ROOT = Path(__file__).parents[1]
TESTS = "tests/kernels/test_triton.py"
NEEDED = "not decod and not a_cpu_needs"
"""Tests of the gate: all that are not for decoding or for a machine without a GPU."""
REHEARSED = "end_together or unsupported_call"
PYTHON = (sys.executable, "-m")
HEAD = ("phase", "process", "seconds", "ended", "last line")


class Phase(NamedTuple):
    """Processes that run at once, or in turn."""

    name: str
    seconds: float
    processes: dict[str, Sequence[str]]
    """Command by name."""
    in_turn: bool = False


def make_phases(out: Path, tiny: bool, shards: int) -> Iterator[Phase]:
    """In order. The whole takes at most 14 minutes."""
    gate = {f"gate-{index}": (*PYTHON, PROGRAM, "--gate", f"{index}/{shards}") for index in range(shards)}
    yield Phase("gate", 120, {name: (*words, *["--tiny"] * tiny) for name, words in gate.items()})
    only_read = ["--help"] * tiny
    yield Phase("passes", 300, {"passes": (*PYTHON, "bench.passes", "--out", str(out), *only_read)})
    step = *PYTHON, "timings.gpu_step", "--out"
    length, long = ("32", "64") if tiny else ("2048", "8192")
    steps: dict[str, Sequence[str]] = {
        "step-long": (*step, str(out / "long"), "--lengths", long, "--no-compiled"),
        "step-compiled": (*step, str(out / "compiled"), "--lengths", length, "--compiled", *only_read),
    }
    yield Phase("step", 180, steps, in_turn=True)
    yield Phase("commands", 120, make_commands(out / "runs", tiny), in_turn=True)
    quick = *PYTHON, "bench", "--quick", "--minutes", "2", "--out", str(out)
    yield Phase("bench", 120, {"bench": (*quick, *only_read)})


def make_commands(runs: Path, tiny: bool) -> dict[str, Sequence[str]]:
    """Commands of lit-lazy that no GPU has run yet, in turn: the first training is killed, the second resumes it."""
    command, made = (*PYTHON, "lit_lazy"), "backcopy_tiny" if tiny else "backcopy_small"
    place, devices = ("--runs", str(runs)), ("--devices", "1")
    precise = "--train.precision=bf16"
    lazy = "--model.attention.normaliser=Elastic", "--model.attention.bias=LearnedBias"
    train = *command, "train", made, precise, *lazy, *place
    of_trained = f'exec "$0" -m lit_lazy "$@" "$(ls {runs}/train-{made}/*/final.ckpt | head -n 1)"'
    found: dict[str, Sequence[str]] = {
        "train-killed": ("sh", "-c", 'timeout -s KILL 10 "$0" "$@" || true', *train),
        "train-resumed": train,
        "evaluate": ("sh", "-c", of_trained, sys.executable, "evaluate"),
        "generate": ("sh", "-c", of_trained, sys.executable, "generate", "--prompt", "0 5 7", "--tokens", "4"),
        "train-compiled": (*train, "--compile", "--seed=1"),
        "torchrun": (*PYTHON, "torch.distributed.run", "--nproc-per-node", "1", "-m", *train[2:], *devices, "--seed=2"),
        "grid": (*command, "ablate", "run", "table2", "--base", made, "--seeds", "0", precise, *place),
        "gated-delta-net": (*command, "train", made, precise, "--model.mixer=GatedDeltaNet", *place),
    }
    return {name: found[name] for name in ("train-resumed", "evaluate", "generate")} if tiny else found


class Ledger:
    """What ran: a table, rewritten after every process."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {**collect_provenance(out / "quarter-hour.json"), "rows": []}

    def add(self, phase: str, name: str, started: float, status: int | None) -> None:
        lines = (self.out / f"{name}.log").read_text(errors="replace").strip().splitlines()
        ended = "at its limit" if status is None else "well" if status == 0 else f"with status {status}"
        seconds, last = time.monotonic() - started, lines[-1][:120] if lines else ""
        self.result["rows"].append({"phase": phase, "process": name, "seconds": seconds, "ended": ended, "last": last})
        (self.out / "quarter-hour.json").write_text(json.dumps(self.result, indent=1) + "\n")
        (self.out / "quarter-hour.md").write_text(self.format())
        print(self.format_line(self.result["rows"][-1]), flush=True)

    def format(self) -> str:
        """The table as Markdown."""
        lines = [format_row(HEAD), "|:---|:---|---:|:---|:---|", *map(self.format_line, self.result["rows"])]
        return "\n".join([*lines, "", format_provenance(self.result)]) + "\n"

    @staticmethod
    def format_line(row: dict[str, Any]) -> str:
        last = row["last"].replace("|", "/")
        return format_row([row["phase"], row["process"], f"{row['seconds']:.0f}", row["ended"], last])


def run_phase(phase: Phase, ledger: Ledger, environment: dict[str, str]) -> None:
    """Run a phase's processes at once, or in turn, each until the phase's limit."""
    until = time.monotonic() + phase.seconds
    if phase.in_turn:
        for name, words in phase.processes.items():
            run_together(phase.name, {name: words}, ledger, until, environment)
    else:
        run_together(phase.name, phase.processes, ledger, until, environment)


def run_together(
    phase: str, processes: dict[str, Sequence[str]], ledger: Ledger, until: float, environment: dict[str, str]
) -> None:
    started, running = time.monotonic(), dict[str, subprocess.Popen[bytes]]()
    for name, words in processes.items():
        with (ledger.out / f"{name}.log").open("wb") as log:
            running[name] = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
    while running:
        for name, process in list(running.items()):
            late = time.monotonic() >= until
            if late:
                os.killpg(process.pid, 9)  # with the processes that it started
                process.wait()
            if process.poll() is not None:
                ledger.add(phase, name, started, None if late else process.returncode)
                del running[name]
        time.sleep(0.05)


def run_gate(shard: str, tiny: bool) -> int:
    """Every n-th test of the gate; returns pytest's exit status."""
    import pytest

    index, shards = map(int, shard.split("/"))

    class Shard:
        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            items[:] = items[index::shards]

    chosen = REHEARSED if tiny else NEEDED
    words = ["--noconftest", "-q", "-p", "no:cacheprovider", "-m", "not long", "-k", chosen, TESTS]
    return pytest.main(words, plugins=[Shard()])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit status: 1 if a process did not end well."""
    parser = argparse.ArgumentParser(
        prog=f"python3 -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the figures")
    parser.add_argument("--tiny", action="store_true", help="the rehearsal on a CPU, in seconds")
    parser.add_argument("--shards", type=int, default=12, metavar="N", help="processes of the gate (default 12)")
    parser.add_argument("--gate", metavar="I/N", help="only the I-th of N parts of the gate, in this process")
    options = parser.parse_args(argv)
    if options.gate:
        return run_gate(options.gate, options.tiny)
    if options.out is None:
        parser.error("--out is missing")
    ledger, environment = Ledger(options.out.absolute()), dict(os.environ)
    folders = [str(ROOT / folder) for folder in (".", "kernels", "tests/kernels")]
    environment["PYTHONPATH"] = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
    if options.tiny:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for phase in make_phases(ledger.out, options.tiny, options.shards):
        run_phase(phase, ledger, environment)
    return int(any(row["ended"] != "well" for row in ledger.result["rows"]))


if __name__ == "__main__":
    sys.exit(main())
