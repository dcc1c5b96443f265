"""The queue of a search, whose points are drawn by Optuna's TPE when a worker claims them.

It behaves like any queue of cells (workers may join, die and be replaced; a point is finished once), except that the
parameters of a point are chosen when it is claimed, from the results of finished points.
"""

import functools
import math
from collections.abc import Mapping, Set
from dataclasses import asdict
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState

from lit_lazy.grid.queue.queue import STATES, Queue, Task
from lit_lazy.grid.search.definition import Definition
from lit_lazy.table.search_points import Point

GOOD_SHARE = 0.25
"""Fraction of the complete points that counts as good in the importances."""
FEWEST_FOR_IMPORTANCE = 5


class SearchQueue(Queue):
    """Waiting, running, complete, pruned and failed points."""

    @functools.cached_property
    def definition(self) -> Definition:
        """The definition of the search, available once its parent run has started."""
        return Definition.from_json(self.facts["definition"])

    def claim(self, worker: Mapping[str, str], keys: Set[str] | None = None) -> Task | None:
        """Claim a waiting point. A point that was claimed before keeps its parameters; a new one is drawn."""
        task = super().claim(worker, keys)
        return self._draw_cell(task) if task and not task.cell.config else task

    def _draw_cell(self, task: Task) -> Task:
        # Serialised: each draw depends on the running points of other workers.
        with self.lock():
            self._retry(lambda: self._draw_parameters(task.trial_id))
            trial = self._retry(lambda: self._storage.get_trial(task.trial_id))
            cell = self.definition.make_cell(_parse_number(trial), trial.params)
            self._set_attribute(task.trial_id, "cell", asdict(cell))
        return Task(cell, task.trial_id, task.token)

    def _draw_parameters(self, trial_id: int) -> None:
        """Draw the parameters of a trial; idempotent.

        The sampler works on a copy of the study and is seeded by the trial's number: the same finished points give the
        same next one, whichever process draws it and however often the search was interrupted.
        """
        trial = self._storage.get_trial(trial_id)
        definition = self.definition
        space: dict[str, BaseDistribution] = {
            path: FloatDistribution(axis.low, axis.high, log=axis.log) for path, axis in definition.axes.items()
        }
        seed = np.random.SeedSequence((definition.seed, trial.number)).generate_state(1)[0]
        sampler = optuna.samplers.TPESampler(n_startup_trials=definition.startup, seed=int(seed), constant_liar=True)
        copy = optuna.create_study(sampler=sampler)
        states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
        others = self._storage.get_all_trials(self._study_id, deepcopy=False, states=states)
        copy.add_trials(
            [other for other in others if other.params.keys() == space.keys() and other.number != trial.number]
        )
        drawn = copy.ask(space).params
        for path, distribution in space.items():
            if path not in trial.params:
                self._storage.set_trial_param(trial_id, path, drawn[path], distribution)

    def should_prune(self, task: Task, step: int, value: float) -> bool:
        """Report the objective at a validation; returns whether it is worse than the median of complete points there.

        A step that was reported before the run resumed is not reported again. Raises CellLostError if another worker
        has the point.
        """
        self.check_held(task)
        pruner = optuna.pruners.MedianPruner(self.definition.startup, n_warmup_steps=self.definition.min_steps)

        def report() -> bool:
            if step not in self._storage.get_trial(task.trial_id).intermediate_values:
                self._storage.set_trial_intermediate_value(task.trial_id, step, value)
            return pruner.prune(self._load_study(), self._storage.get_trial(task.trial_id))

        return self._retry(report)

    def prune(self, task: Task, reason: str, diverged: bool) -> None:
        """Record a point as pruned or diverged. Raises CellLostError if another worker has it."""
        reports = self._retry(lambda: self._storage.get_trial(task.trial_id)).intermediate_values
        last = reports[max(reports)] if reports else math.nan
        # Optuna's convention: the value of a pruned trial is its last report.
        value = None if math.isnan(last) else last
        self._end_attempt(task, TrialState.PRUNED, value, reason=reason, diverged=diverged)

    def points(self) -> list[Point]:
        """All points, each from its newest trial."""
        trials = self._retry(lambda: self._storage.get_all_trials(self._study_id, deepcopy=False))
        newest = {_parse_number(trial): self._make_point(trial) for trial in trials if "key" in trial.user_attrs}
        return [newest[number] for number in sorted(newest)]

    def best(self) -> Point | None:
        """The complete point with the lowest objective."""
        try:
            return self._make_point(self._retry(lambda: self._storage.get_best_trial(self._study_id)))
        except ValueError:  # none is complete
            return None

    def importances(self) -> dict[str, float]:
        """Importances of the axes by dotted path, by PED-ANOVA (Watanabe et al., arXiv 2304.10255); sum to 1.

        They compare the density of the best quarter of the complete points with the density of all. Empty with too few
        points.
        """
        study = self._load_study()
        if len(study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))) < FEWEST_FOR_IMPORTANCE:
            return {}
        evaluator = PedAnovaImportanceEvaluator(target_quantile=GOOD_SHARE)
        return {path: float(share) for path, share in get_param_importances(study, evaluator=evaluator).items()}

    def _make_point(self, trial: FrozenTrial) -> Point:
        attrs: dict[str, Any] = trial.user_attrs
        complete = trial.state == TrialState.COMPLETE
        diverged = trial.state == TrialState.PRUNED and attrs["diverged"]
        return Point(
            number=_parse_number(trial),
            run=attrs["cell"]["key"] if attrs["cell"]["config"] else "",
            params={path: trial.params[path] for path in self.definition.axes if path in trial.params},
            state="diverged" if diverged else STATES[trial.state.name],
            value=trial.value if complete else None,
            reports={step: value for step, value in sorted(trial.intermediate_values.items()) if math.isfinite(value)},
            reason="" if complete else attrs.get("reason", ""),
        )

    def _load_study(self) -> optuna.Study:
        return optuna.load_study(study_name=self.name, storage=self._storage)


def _parse_number(trial: FrozenTrial) -> int:
    return int(trial.user_attrs["key"].removeprefix("point "))
