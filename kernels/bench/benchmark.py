"""The complete benchmark on a GPU: correctness gate, compilation, ceilings, workloads. It saves every step and resumes.

This process never touches the GPU: GPU code runs in worker processes, so that no crash there ends the benchmark.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import results, timing
from bench.correctness import CASES, check_cases
from bench.provenance import collect_provenance
from bench.timing import compile_choice, measure, measure_ceilings
from bench.worker import GpuWorker, run_in_parallel
from bench.workloads import GUARDS, Workload, find_gate_failures, plan_seconds
from flash_lazy.fused import configurations

PEER_SECONDS, WORKLOAD_SECONDS, STAGE_SECONDS, GRACE_SECONDS = 60.0, 240.0, 240.0, 45.0
"""Timeouts of a worker: for a peer, a workload, another task (such as a case of the gate), and after --minutes."""
MAX_WORKERS = 12
STRIKES = 2
"""Worker processes that a peer may crash in one operation before its other workloads skip the peer."""


class Benchmark:
    """Runs the benchmark and saves its results in a folder.

    setup: called first in every worker. The other arguments are the command's options.
    """

    def __init__(
        self,
        out: Path,
        workloads: Sequence[Workload],
        backend: str,
        authors: Path | None,
        minutes: float | None,
        time_anyway: bool,
        setup: Callable[[], None] = timing.prepare,
    ) -> None:
        self.out, self.workloads, self.backend, self.authors = out, workloads, backend, authors
        self.time_anyway, self.setup = time_anyway, setup
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.log = out / "bench.log"
        self.result: dict[str, Any] = {}

    def run(self, fresh: bool) -> int:
        """Measure what is missing. Returns the exit status, 1 if results are wrong or the GPU cannot be used.

        Raises RefusedError before writing anything if the folder holds results that cannot be continued.
        """
        with GpuWorker(self.setup) as worker:
            found = worker.run(partial(collect_provenance, "bench"), STAGE_SECONDS)
        if found.failed:
            print(f"the GPU cannot be used: {found.failed}")
            return 1
        self.result = results.open_results(self.out, found.value, fresh)
        self.out.mkdir(parents=True, exist_ok=True)
        todo = self.list_missing_workloads()
        estimate = f", estimated {plan_seconds(todo) / 60:.0f} minutes" if todo else ""
        print(f"{len(todo)} of {len(self.workloads)} workloads to measure{estimate}", flush=True)
        self.check_cases([name for name in GUARDS if any(GUARDS[name](workload) for workload in todo)])
        self.compile_ahead([workload for workload in todo if self.time_anyway or not self.find_failures(workload)])
        with GpuWorker(self.setup, self.log) as worker:
            if todo and self.result["ceilings"] is None:
                ceilings = worker.run(measure_ceilings, self.limit_seconds(STAGE_SECONDS))
                self.result["ceilings"] = ceilings.value
                self.write_and_print(f"ceilings: {ceilings.failed or ceilings.value}")
            for number, workload in enumerate(todo, 1):
                if not self.is_over():
                    self.measure(worker, workload, f"[{number}/{len(todo)}] {workload}")
        if not self.is_over():
            self.check_cases(list(CASES))
        self.write()
        if why := results.write_plots(self.result, self.out):
            print(why)
        wrong = [row for row in self.result["gate"] if not row["passed"]]
        print(f"{len(wrong)} of {len(self.result['gate'])} checked results are wrong; results are in {self.out}")
        return 1 if wrong else 0

    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def limit_seconds(self, seconds: float) -> float:
        """Timeout of a worker: `seconds`, shortened near the end of --minutes."""
        return max(1.0, min(seconds, self.end + GRACE_SECONDS - time.monotonic()))

    def list_missing_workloads(self) -> list[Workload]:
        """Workloads to measure: first those without a record, then the lost ones."""
        records = self.result["points"]
        new = [
            workload
            for workload in self.workloads
            if str(workload) not in records or "blocked" in records[str(workload)]
        ]
        return new + [workload for workload in self.workloads if "lost" in records.get(str(workload), {})]

    def find_failures(self, workload: Workload) -> list[str]:
        return find_gate_failures(workload, self.result["gate"])

    def write(self) -> None:
        results.write(self.out, self.result, self.workloads)

    def write_and_print(self, text: str) -> None:
        self.write()
        print(text, flush=True)

    def check_cases(self, cases: Sequence[str]) -> None:
        """Check the cases that have no rows yet, in parallel because compiling their kernels dominates the time."""
        checked = {row["case"] for row in self.result["gate"]}
        tasks = {name: partial(check_cases, self.backend, [name]) for name in cases if name not in checked}
        for name, outcome in run_in_parallel(
            tasks, count_workers(), partial(self.limit_seconds, STAGE_SECONDS), self.setup, self.log
        ):
            if outcome.late and self.is_over():
                continue
            rows = outcome.value or [{"case": name, "passed": False, "failed": outcome.failed}]
            self.result["gate"] += rows
            wrong = [row for row in rows if not row["passed"]]
            self.write_and_print(
                "\n".join(f"wrong: {results.format_wrong_row(row)}" for row in wrong) or f"right: {name}"
            )

    def compile_ahead(self, workloads: Sequence[Workload]) -> None:
        """Compile every configuration of our kernels in parallel, so that tuning finds them on disk."""
        first = {(p.operation, p.kv_heads, p.width, p.batch == 1): p for p in reversed(workloads) if p.rows > 1}
        tasks = {
            (key, index, skip): partial(compile_choice, workload, self.backend, index, skip)
            for key, workload in first.items()
            for index in range(_count_configurations())
            for skip in (True, False)
        }
        if self.is_over() or not tasks:
            return
        outcomes = run_in_parallel(
            tasks, count_workers(), partial(self.limit_seconds, STAGE_SECONDS), self.setup, self.log
        )
        failed = [outcome.failed for _, outcome in outcomes if outcome.failed]
        self.write_and_print(
            f"compiled ahead: {len(tasks) - len(failed)} of {len(tasks)} configurations"
            + "".join(f"; {why}" for why in failed[:1])
        )

    def measure(self, worker: GpuWorker, workload: Workload, title: str) -> None:
        """Record the workload's figures, or why there are none; a peer that crashes the worker is skipped."""
        wrong, started = self.find_failures(workload), time.monotonic()
        record: dict[str, Any] = {"point": workload._asdict()}
        self.result["points"].pop(str(workload), None)
        if wrong and not self.time_anyway:
            self.result["points"][str(workload)] = record | {"blocked": wrong}
            self.write_and_print(f"{title}: blocked by the gate: {', '.join(wrong)}")
            return
        skipped, crashed = self.find_struck_peers(workload.operation), {}
        while True:
            task = partial(measure, workload, self.backend, self.authors, skipped | crashed)
            outcome = worker.run(task, self.limit_seconds(WORKLOAD_SECONDS), PEER_SECONDS)
            if self.is_over() and outcome.late:
                print(f"{title}: stopped, --minutes is over", flush=True)
                return
            if not outcome.ended or outcome.doing not in results.KINDS or outcome.doing in crashed:
                break
            crashed[outcome.doing] = f"crashed its process: {outcome.failed}"
        if outcome.failed:
            record |= {"lost": f"{outcome.failed} ({outcome.doing or 'starting'})"}
        else:
            record |= outcome.value | {"red": wrong, "ended": list(crashed)}
        self.result["points"][str(workload)] = record
        self.write_and_print(f"{title}: {_format_summary(record)} ({time.monotonic() - started:.0f} s)")

    def find_struck_peers(self, operation: str) -> dict[str, str]:
        """Peers that have crashed STRIKES workers in this operation, with the reason to skip them."""
        crashes = [
            name
            for p, record in results.list_measured(self.result)
            if p.operation == operation
            for name in record["ended"]
        ]
        why = f"crashed its process at {STRIKES} other workloads"
        return {name: why for name in crashes if crashes.count(name) >= STRIKES}


def count_workers() -> int:
    return min(os.cpu_count() or 1, MAX_WORKERS)


def _count_configurations() -> int:
    """Length of the longest list of configurations for the widths of most workloads."""
    if not configurations.AUTOTUNE:
        return 1
    queries = [torch.empty(1, 1, 1, width, dtype=torch.bfloat16) for width in (64, 128)]
    return max(len(configurations.list_choices(kernel, q)) for kernel in configurations.CONFIGURATIONS for q in queries)


def _format_summary(record: dict[str, Any]) -> str:
    if "lost" in record:
        return f"lost: {record['lost']}"
    times = {name: cell["milliseconds"]["median"] for name, cell in record["cells"].items() if "milliseconds" in cell}
    return ", ".join(f"{name} {time:.3g} ms" for name, time in times.items()) or "no peer was measured"
