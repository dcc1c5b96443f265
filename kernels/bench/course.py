"""The course of a benchmark on a GPU: gate, compilation, ceilings, points. Every step is written as soon as it is done.

This process never touches the GPU: what does runs in workers, so that nothing that happens there ends the course.
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import results, timing
from bench.gate import GATE, run_gate
from bench.points import GUARDS, BenchPoint, find_gate_failures, plan_seconds
from bench.provenance import collect_provenance
from bench.timing import compile_choice, measure, measure_ceilings
from bench.worker import GpuWorker, run_in_parallel
from flash_lazy.fused import configurations

PEER_SECONDS, POINT_SECONDS, STAGE_SECONDS, GRACE_SECONDS = 60.0, 240.0, 240.0, 45.0
"""Until a worker is killed: at a peer, a point, another task (a case of the gate, say), and after --minutes."""
MOST_WORKERS = 12
STRIKES = 2
"""Processes of one operation that a peer may end before it is left out of that operation's other points."""


class Course:
    """One command's work on the results in a folder.

    setup: called first in every worker. Other arguments as the command's options.
    """

    def __init__(
        self,
        out: Path,
        points: Sequence[BenchPoint],
        backend: str,
        authors: Path | None,
        minutes: float | None,
        time_anyway: bool,
        setup: Callable[[], None] = timing.prepare,
    ) -> None:
        self.out, self.points, self.backend, self.authors = out, points, backend, authors
        self.time_anyway, self.setup = time_anyway, setup
        self.end = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.log = out / "bench.log"
        self.result: dict[str, Any] = {}

    def run(self, fresh: bool) -> int:
        """Measures what is missing; the exit status: 1 where the gate is red or the GPU cannot be used.

        Raises results.Refused before anything is written where the folder holds other results.
        """
        with GpuWorker(self.setup) as worker:
            found = worker.run(partial(collect_provenance, "bench"), STAGE_SECONDS)
        if found.failed:
            print(f"the GPU cannot be used: {found.failed}")
            return 1
        self.result = results.open_results(self.out, found.value, fresh)
        self.out.mkdir(parents=True, exist_ok=True)
        todo = self.list_missing_points()
        planned = f", about {plan_seconds(todo) / 60:.0f} minutes by plan" if todo else ""
        print(f"{len(todo)} of {len(self.points)} points to measure{planned}", flush=True)
        self.check_cases([name for name in GUARDS if any(GUARDS[name](point) for point in todo)])
        self.compile_ahead([point for point in todo if self.time_anyway or not self.find_failures(point)])
        with GpuWorker(self.setup, self.log) as worker:
            if todo and self.result["ceilings"] is None:
                ceilings = worker.run(measure_ceilings, self.limit_seconds(STAGE_SECONDS))
                self.result["ceilings"] = ceilings.value
                self.write_and_print(f"ceilings: {ceilings.failed or ceilings.value}")
            for number, point in enumerate(todo, 1):
                if not self.is_over():
                    self.measure(worker, point, f"[{number}/{len(todo)}] {point}")
        if not self.is_over():
            self.check_cases(list(GATE))
        self.write()
        if left_out := results.write_plots(self.result, self.out):
            print(left_out)
        wrong = [row for row in self.result["gate"] if not row["passed"]]
        print(f"{len(wrong)} of {len(self.result['gate'])} results of the gate are wrong; all is in {self.out}")
        return 1 if wrong else 0

    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def limit_seconds(self, seconds: float) -> float:
        """Seconds that a worker gets."""
        return max(1.0, min(seconds, self.end + GRACE_SECONDS - time.monotonic()))

    def list_missing_points(self) -> list[BenchPoint]:
        """The points to measure: first those without a record, then those that were lost."""
        records = self.result["points"]
        new = [point for point in self.points if str(point) not in records or "blocked" in records[str(point)]]
        return new + [point for point in self.points if "lost" in records.get(str(point), {})]

    def find_failures(self, point: BenchPoint) -> list[str]:
        return find_gate_failures(point, self.result["gate"])

    def write(self) -> None:
        results.write(self.out, self.result, self.points)

    def write_and_print(self, text: str) -> None:
        """Writes the results, then prints a line."""
        self.write()
        print(text, flush=True)

    def check_cases(self, cases: Sequence[str]) -> None:
        """The gate's cases that have no rows yet, side by side: compiling their kernels takes the time."""
        checked = {row["case"] for row in self.result["gate"]}
        tasks = {name: partial(run_gate, self.backend, [name]) for name in cases if name not in checked}
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

    def compile_ahead(self, points: Sequence[BenchPoint]) -> None:
        """Every configuration of our kernels, side by side, so that the points' tuning finds them on disk."""
        first = {(p.operation, p.kv_heads, p.width, p.batch == 1): p for p in reversed(points) if p.rows > 1}
        tasks = {
            (key, index, skip): partial(compile_choice, point, self.backend, index, skip)
            for key, point in first.items()
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
            f"compiled ahead: {len(tasks) - len(failed)} of {len(tasks)} choices"
            + "".join(f"; {f}" for f in failed[:1])
        )

    def measure(self, worker: GpuWorker, point: BenchPoint, title: str) -> None:
        """Records the point: its figures, or why there are none. A peer that ends the process is left out, and why."""
        wrong, started = self.find_failures(point), time.monotonic()
        record: dict[str, Any] = {"point": point._asdict()}
        self.result["points"].pop(str(point), None)
        if wrong and not self.time_anyway:
            self.result["points"][str(point)] = record | {"blocked": wrong}
            self.write_and_print(f"{title}: blocked by the gate: {', '.join(wrong)}")
            return
        left_out, ended = self.find_struck_peers(point.operation), {}
        while True:
            task = partial(measure, point, self.backend, self.authors, left_out | ended)
            outcome = worker.run(task, self.limit_seconds(POINT_SECONDS), PEER_SECONDS)
            if self.is_over() and outcome.late:
                print(f"{title}: the time was used up (--minutes)", flush=True)
                return
            if not outcome.ended or outcome.doing not in results.KINDS or outcome.doing in ended:
                break
            ended[outcome.doing] = f"it ended the process: {outcome.failed}"
        if outcome.failed:
            record |= {"lost": f"{outcome.failed} ({outcome.doing or 'starting'})"}
        else:
            record |= outcome.value | {"red": wrong, "ended": list(ended)}
        self.result["points"][str(point)] = record
        self.write_and_print(f"{title}: {_format_summary(record)} ({time.monotonic() - started:.0f} s)")

    def find_struck_peers(self, operation: str) -> dict[str, str]:
        """The peers that have ended processes of this operation often enough."""
        ends = [
            name
            for p, record in results.list_measured(self.result)
            if p.operation == operation
            for name in record["ended"]
        ]
        why = f"it ended the process at {STRIKES} other points"
        return {name: why for name in ends if ends.count(name) >= STRIKES}


def count_workers() -> int:
    return min(os.cpu_count() or 1, MOST_WORKERS)


def _count_configurations() -> int:
    """The length of the longest list that the points' widths choose from."""
    if not configurations.AUTOTUNE:
        return 1
    q = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    return max(len(configurations.choices(kernel, q)) for kernel in configurations.CONFIGURATIONS)


def _format_summary(record: dict[str, Any]) -> str:
    if "lost" in record:
        return f"lost: {record['lost']}"
    times = {name: cell["milliseconds"]["median"] for name, cell in record["cells"].items() if "milliseconds" in cell}
    return ", ".join(f"{name} {time:.3g} ms" for name, time in times.items()) or "no peer could be measured"
