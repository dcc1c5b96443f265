"""Runs a search: Optuna's TPE draws each point from the results of the others when a worker is free for it."""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from lit_lazy.grid.ablation import Cell
from lit_lazy.grid.cell_state import HOLDER, clear_leftovers
from lit_lazy.grid.estimate import estimate_training
from lit_lazy.grid.mlflow_mirror import GridMirror, MirroredCell
from lit_lazy.grid.run import execute_cells, is_finished, open_folder
from lit_lazy.grid.search.definition import DEFINITION, MONITORED, Definition, point_name
from lit_lazy.grid.study import open_study
from lit_lazy.grid.work_records import Ending, LaunchOptions, Work
from lit_lazy.support.console import format_count, format_duration
from lit_lazy.support.disk import write_text
from lit_lazy.support.error_messages import explain
from lit_lazy.support.locks import make_file_lock
from lit_lazy.support.secrets import format_command_line
from lit_lazy.table.records import Point
from lit_lazy.tracking.store_address import NOTE, End
from lit_lazy.tracking.views import build_views
from lit_lazy.training import run_folder
from lit_lazy.training.run_folder import RunResult

DRAWING = "draw.lock"
"""File in a search's folder, held while a point is drawn."""
NUMBER, KEY, REASON = "number", "key", "reason"
"""Attributes of a trial."""
HOPELESS = "is worse than the median of the points there"
DIVERGED = "diverged: "
"""Begins the reason of a point whose loss is not finite any more."""
GOOD_SHARE = 0.25
"""Fraction of the complete points that counts as good in the importances."""
FEWEST_FOR_IMPORTANCE = 5
STATES: dict[str, Any] = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}


def _name_state(trial: FrozenTrial) -> Any:
    """The `state` of a trial's `Point`."""
    return "diverged" if trial.user_attrs.get(REASON, "").startswith(DIVERGED) else STATES[trial.state.name]


@dataclass(frozen=True)
class SearchWork(Work):
    """A search on an experiment, ready to run; `cells` are placeholders for its points."""

    definition: Definition
    noun: ClassVar[str] = "points"


class SearchDriver:
    """The points of a search, as trials of a study."""

    def __init__(self, work: SearchWork, storage: str | None) -> None:
        self.work, self.storage, self.definition = work, storage, work.definition
        self._held: dict[str, Trial] = {}
        """Points that this process has given to workers, by key."""
        self._failed: set[int] = set()
        """Numbers of the points that failed for this command."""

    @cached_property
    def study(self) -> optuna.Study:
        """The study, with the pruner of the search."""
        study = open_study(self.storage, self.work.folder)
        study.pruner = optuna.pruners.MedianPruner(self.definition.startup, n_warmup_steps=self.definition.min_steps)
        return study

    def _newest(self) -> dict[int, FrozenTrial]:
        """The newest trial of each point by its number."""
        trials = self.study.get_trials(deepcopy=False)
        return {trial.user_attrs[NUMBER]: trial for trial in trials if NUMBER in trial.user_attrs}

    def states(self) -> dict[str, str]:
        newest = self._newest()
        return {point_name(number): self._read_state(newest.get(number)) for number in range(len(self.work.cells))}

    def _read_state(self, trial: FrozenTrial | None) -> str:
        """The state of a point by its newest trial: one that nobody trains, or failed for another command, waits."""
        if trial is None:
            return "waiting"
        state, key = _name_state(trial), trial.user_attrs[KEY]
        lost = state == "running" and key not in self._held and not run_folder.is_locked(self.work.locate(key))
        return "waiting" if lost or (state == "failed" and trial.user_attrs[NUMBER] not in self._failed) else state

    def choose(self) -> Cell | None:
        newest = self._newest()
        for number in range(len(self.work.cells)):
            trial = newest.get(number)
            if self._read_state(trial) == "waiting":
                new = trial is None or trial.state.is_finished()
                cell = self._draw(number, trial) if new else self._resume(trial)
                if cell is not None:
                    return cell
        return None

    def _draw(self, number: int, former: FrozenTrial | None) -> Cell | None:
        """A new point, after the former one of its number failed; None if another command has drawn one meanwhile.

        The sampler is seeded by the number of points drawn: equal results of others give an equal point.
        """
        with make_file_lock(self.work.folder / DRAWING):
            trials = self.study.get_trials(deepcopy=False)
            for known in trials:
                if NUMBER not in known.user_attrs and not known.state.is_finished():  # its command died in here
                    self.study.tell(known.number, state=TrialState.FAIL)
            newest = self._newest().get(number)
            if newest is not None and (former is None or newest.number != former.number):
                return None
            definition, drawn = self.definition, sum(NUMBER in trial.user_attrs for trial in trials)
            seed = int(np.random.SeedSequence((definition.seed, drawn)).generate_state(1)[0])
            self.study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=definition.startup, seed=seed, constant_liar=True
            )
            trial = self.study.ask()
            for path, axis in definition.axes.items():
                trial.suggest_float(path, axis.low, axis.high, log=axis.log)
            cell = definition.make_cell(number, trial.params)
            trial.set_user_attr(KEY, cell.key)
            trial.set_user_attr(NUMBER, number)  # last: a trial without a number is none of a point
            run_folder.clear_failure(self.work.locate(cell.key))
            self._held[cell.key] = trial
            return cell

    def _resume(self, frozen: FrozenTrial) -> Cell | None:
        """A point whose worker ended early; None if it has ended, or is not worth its remaining steps."""
        trial, step = Trial(self.study, frozen._trial_id), frozen.last_step
        cell = self.definition.make_cell(frozen.user_attrs[NUMBER], trial.params)
        if self._settle(trial, cell.key):  # its command died before it told
            return None
        if step is not None and (reason := self._describe_pruning(trial, step, frozen.intermediate_values[step])):
            with run_folder.hold(folder := self.work.locate(cell.key)) as is_free:
                if is_free:
                    run_folder.write_failure(folder, reason, final=True)  # as its worker does
            self._settle(trial, cell.key)
            return None
        self._held[cell.key] = trial
        return cell

    def _settle(self, trial: Trial, key: str) -> bool:
        """Tell how a point ended by what is in its folder, unless another command has; whether it has ended."""
        folder = self.work.locate(key)
        result, reason = RunResult.peek(folder), run_folder.read_failure(folder)
        state, value = TrialState.FAIL, None
        if result is not None:
            state, value, reason = TrialState.COMPLETE, result.metrics[self.definition.objective], ""
            clear_leftovers(folder)
        elif not reason:
            return False
        elif run_folder.is_final(folder):  # it was hopeless, or its loss is not finite any more
            state, reason = TrialState.PRUNED, reason if HOPELESS in reason else f"{DIVERGED}{reason}"
            with run_folder.hold(folder) as is_free:
                if is_free:
                    run_folder.remove_checkpoints(folder)
                    (folder / HOLDER).unlink(missing_ok=True)
        else:
            self._failed.add(trial.user_attrs[NUMBER])
        with suppress(UpdateFinishedTrialError):
            if reason:
                trial.set_user_attr(REASON, reason)
            self.study.tell(trial, value, state=state, skip_if_finished=True)
        return True

    def record(self, ending: Ending) -> None:
        self._settle(self._held[ending.key], ending.key)
        del self._held[ending.key]  # not before: the study's disk may be full

    def judge(self, key: str, step: int, value: float) -> str:
        """Report the objective at a validation; returns why the point is not worth its remaining steps, or ""."""
        trial = self._held[key]
        if step not in self.study.get_trials(deepcopy=False)[trial.number].intermediate_values:
            try:
                trial.report(value, step)
            except UpdateFinishedTrialError:  # its worker began it before this one's did
                return "another command has ended it"
        return self._describe_pruning(trial, step, value)

    def _describe_pruning(self, trial: Trial, step: int, value: float) -> str:
        if step >= self.definition.steps or not trial.should_prune():
            return ""
        metric = MONITORED[self.definition.objective]
        return f"{metric} {value:.4g} at step {step}{f' {HOPELESS}' if math.isfinite(value) else ''}"

    def points(self) -> list[Point]:
        """All points that were drawn, each from its newest trial."""
        found = []
        for number, trial in sorted(self._newest().items()):
            state = _name_state(trial)
            point = Point(
                number=number,
                run=trial.user_attrs[KEY],
                params={path: trial.params[path] for path in self.definition.axes},
                state=state,
                value=trial.value if state == "complete" else None,
                reports={step: x for step, x in sorted(trial.intermediate_values.items()) if math.isfinite(x)},
                reason="" if state == "complete" else trial.user_attrs.get(REASON, ""),
            )
            found.append(point)
        return found

    def importances(self) -> dict[str, float]:
        """Importances of the axes by dotted path, by PED-ANOVA (Watanabe et al., arXiv 2304.10255); sum to 1.

        They compare the density of the best quarter of the complete points with the density of all. Empty with too few
        points.
        """
        if len(self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < FEWEST_FOR_IMPORTANCE:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=GOOD_SHARE)
        return {path: float(share) for path, share in get_param_importances(self.study, evaluator=evaluator).items()}

    def describe_best(self) -> list[str]:
        """A line such as `best 0.0099 at point 7 (tau_init 0.5, lr 0.003)`; none until a point is complete."""
        complete = [point for point in self.points() if point.value is not None]
        if not complete:
            return []
        best = min(complete, key=lambda point: point.value or 0.0)
        names = self.definition.names
        values = ", ".join(f"{names[path]} {value:.4g}" for path, value in best.params.items())
        return [f"best {best.value:.4f} at point {best.number} ({values})"]


def run_search(driver: SearchDriver, launch: LaunchOptions, console: Console) -> bool:
    """Execute the missing points of a search; returns whether every point is finished."""
    work = driver.work
    with open_folder(work, launch, console):
        if (file := work.folder / DEFINITION).exists():
            with explain(f"{str(file)!r}: is damaged", "put a copy back, or start again by --fresh", ValueError):
                known = Definition.from_json(file.read_text(encoding="utf-8"))
            if changed := work.definition.find_differences(known):
                raise ValueError(
                    f"{work.id}: {', '.join(changed)} changed since this search was started; --fresh moves the former "
                    "results away, another name of the search, or another --runs folder, keeps both"
                )
        write_text(file, work.definition.to_json())
        monitored = MONITORED[work.definition.objective]
        execute_cells(work, launch, driver, console, driver.describe_best, monitored=monitored)
        return is_finished(driver.states())


class SearchMirror(GridMirror):
    """MLflow's copy of a search."""

    kind = "search"

    def __init__(self, driver: SearchDriver) -> None:
        super().__init__(driver.work.folder)
        self.driver, self.definition = driver, driver.definition

    def has_begun(self) -> bool:
        return (self.folder / DEFINITION).exists()

    def list_cells(self) -> list[MirroredCell]:
        names, seed = self.definition.names, self.definition.base["seed"]
        return [
            MirroredCell(
                folder=run_folder.locate_cell(self.folder, point.run),
                variant=point_name(point.number),
                source="ours",
                seed=seed,
                axes={names[path]: repr(value) for path, value in point.params.items()},
                end=None
                if point.state in ("running", "waiting")
                else End("pruned" if point.state == "diverged" else point.state, point.reason),
            )
            for point in self.driver.points()
        ]

    def make_parent(self) -> tuple[Mapping[str, str], Mapping[str, str], Mapping[str, Any]]:
        definition = self.definition
        params = {f"axis.{definition.names[path]}": str(axis) for path, axis in definition.axes.items()}
        params |= {"objective": definition.objective, "sampler": f"TPE, seed {definition.seed}"}
        return {NOTE: format_command_line()}, params, definition.base

    def show(self, parent_id: str, ended: bool) -> None:  # noqa: ARG002
        axes, metrics = list(self.definition.names.values()), [self.definition.objective]
        self.tracker.save_views("cell", lambda cells: build_views(axes, metrics, metrics, cells))


def print_search(work: SearchWork, workers: int, threads: int, console: Console) -> None:
    """Print the plan of a search and an upper bound on its time; creates nothing."""
    definition, n = work.definition, len(work.cells)
    seconds, every = estimate_training(definition.base), definition.base["train"]["val_every"]
    judged = [step for step in range(every, definition.steps, every) if step >= definition.min_steps]
    when = f"after {', '.join(map(str, judged))} of {definition.steps} steps"
    for path, axis in definition.axes.items():
        console.print(f"{definition.names[path]:12} {axis}   ({path})", highlight=False)
    console.print(
        f"\n{n} points of {work.id} with seed {definition.base['seed']}, minimising {definition.objective}.\n"
        f"Sampler: TPE, seed {definition.seed}, {definition.startup} random points first. Pruning from step "
        f"{definition.min_steps} on: {when if judged else 'none: no validation lies there'}.\n"
        f"About {format_duration(seconds)} per point, at most {format_duration(seconds * n / workers)} of training "
        f"with {format_count(workers, 'worker')} of {format_count(threads, 'thread')}; pruned points take less.\n"
        "Nothing was created.",
        highlight=False,
    )
