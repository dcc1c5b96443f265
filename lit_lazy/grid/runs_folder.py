"""What a runs folder holds, what of it can go, and its removal from disk and MLflow."""

import json
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lit_lazy.grid.cell_state import State, read_state
from lit_lazy.grid.grid_folder import ASIDE, GridFolder
from lit_lazy.grid.plan import PLAN
from lit_lazy.grid.run import find_users
from lit_lazy.grid.search.definition import DEFINITION
from lit_lazy.support.disk import find_leftovers, measure_bytes, remove_unused
from lit_lazy.support.error_messages import did_you_mean
from lit_lazy.support.names_to_paths import delete, find_grids, is_entry_name, join_name, require_deletable
from lit_lazy.tracking.store_address import ARTIFACTS, read_run_address, sqlite_file
from lit_lazy.tracking.tracker import Tracker, list_experiment_names
from lit_lazy.training.run_folder import (
    CELLS,
    CHECKPOINTS,
    FINAL_CHECKPOINT,
    GRID_ID,
    RESULT,
    RunResult,
    hold,
    is_locked,
    keep_quarantined,
    read_settings,
)

TRAINING, SEARCH, DIAGNOSIS = "train-", "search-", "diagnose-"
"""Prefixes of the names of trainings, of searches and of diagnoses, whose MLflow runs share one experiment."""
DIAGNOSES = DIAGNOSIS.removesuffix("-")
WORTH = (RESULT, "table.json", "*.ckpt", "*.npz")
"""Files that a table, a report or a run that resumes needs."""
LEFTOVER = "left by a write that was killed"


@dataclass(frozen=True)
class RunsEntry:
    """An ablation, search or diagnosis, or trainings of an experiment, which a folder or MLflow knows."""

    name: str
    folder: Path
    tracked: bool
    """Whether MLflow has an experiment of its name."""

    @cached_property
    def grid(self) -> GridFolder | None:
        """The ablation in its folder, if it is one."""
        return GridFolder.read(self.folder)

    @property
    def kind(self) -> str:
        """ablation, search, training, diagnosis, or other for a folder that none of them made."""
        if self.name.startswith(TRAINING):
            return "training"
        known = self.tracked or (self.folder / CELLS).is_dir() or (self.folder / PLAN).exists()
        if self.name == DIAGNOSES or (self.name.startswith(DIAGNOSIS) and not known):
            return "diagnosis"
        return ("search" if self.name.startswith(SEARCH) else "ablation") if known else "other"

    @property
    def run_folders(self) -> list[Path]:
        """The run folders of its cells or trainings."""
        inside = self.folder if self.kind == "training" else self.folder / CELLS
        return sorted(path for path in inside.glob("*") if path.is_dir())

    @cached_property
    def counts(self) -> Counter[State]:
        """The numbers of its cells or trainings by state."""
        return Counter(map(read_state, [cell.folder for cell in self.grid.cells] if self.grid else self.run_folders))

    @property
    def state(self) -> str:
        """One or two words for a list."""
        if self.kind in ("other", "diagnosis"):
            return "other files" if self.kind == "other" else "runs in MLflow" if self.tracked else "files"
        if ASIDE in self.name:
            return "moved aside by --fresh"
        if failed := self.counts["failed"]:
            return f"{failed} failed"
        return "complete" if self.counts["complete"] == self.counts.total() else "unfinished"

    @cached_property
    def size(self) -> int:
        """Bytes of its files, MLflow's artifacts included."""
        return measure_bytes(self.folder) + measure_bytes(self.artifacts)

    @property
    def artifacts(self) -> Path:
        """The folder of its artifacts in a local MLflow store."""
        return join_name(self.folder.parent / ARTIFACTS, self.name)

    @property
    def changed(self) -> float | None:
        """Time of the last change of a file in its folder or in a run folder, in seconds since the epoch."""
        places = [self.folder, *self.folder.glob("*"), *(path for run in self.run_folders for path in run.iterdir())]
        return max((path.lstat().st_mtime for path in places), default=None) if self.folder.exists() else None


@dataclass(frozen=True)
class RunsFolder:
    """A runs folder with the MLflow store of its grids, whose address is `uri`."""

    path: Path
    uri: str

    @cached_property
    def entries(self) -> dict[str, RunsEntry]:
        """Everything in the folder by name. A shared MLflow may have more, of which it has no folder."""
        folders = {path.name for path in self.path.iterdir() if path.is_dir() and path.name != ARTIFACTS}
        tracked = set(list_experiment_names(self.uri)) - {"Default"}  # MLflow's own
        alone = tracked - folders - {ARTIFACTS} if self.has_store else set()
        # An experiment's name may be a path, or that of the database.
        alone = {name for name in alone if is_entry_name(name) and not os.path.lexists(self.path / name)}
        return {name: RunsEntry(name, join_name(self.path, name), name in tracked) for name in sorted(folders | alone)}

    @property
    def has_store(self) -> bool:
        """Whether the MLflow store is a file in the folder, so that nobody else's runs are in it."""
        file = sqlite_file(self.uri)
        return file is not None and file.resolve().parent == self.path.resolve()

    def get(self, name: str) -> RunsEntry:
        """The entry of a name, or the one ablation of a short name.

        Raises a one-line ValueError if there is none that can be removed.
        """
        join_name(self.path, name)
        known = [entry.name for entry in self.entries.values() if entry.kind != "other"]
        if name in self.entries and name not in known:
            raise ValueError(f"{name!r}: is no ablation, search, training or diagnosis; remove the folder yourself")
        ablations = [one for one in known if self.entries[one].kind == "ablation" and ASIDE not in one]

        def get_ablation(entry: str) -> str:
            return "" if (grid := self.entries[entry].grid) is None else grid.plan.ablation

        same = [name] if name in known else find_grids(name, ablations, get_ablation)
        if len(same) == 1:
            return self.entries[same[0]]
        listed = ", ".join(same or known) or "none"
        problem = f"{str(self.path)!r} has no such results{did_you_mean(name, known)}"
        raise ValueError(f"{name!r}: {problem}; it has {listed}")

    def find_users(self, entry: RunsEntry) -> list[str]:
        """The processes that use an entry."""
        if entry.kind == "training":
            return ["a training"] * any(map(is_locked, entry.run_folders))
        return find_users(entry.folder)

    def require_removable(self, entry: RunsEntry) -> None:
        """Raise a one-line ValueError if an entry is in use, or something in the way of its removal."""
        self.require_unused(entry)
        for folder in (entry.folder, entry.artifacts):
            require_deletable(folder, self.path)

    def require_unused(self, entry: RunsEntry) -> None:
        """Raise a one-line ValueError if a living process uses an entry."""
        if users := self.find_users(entry):
            raise ValueError(f"{entry.name!r}: is in use ({', '.join(users)}); stop that first, or wait for its end")

    def remove(self, entry: RunsEntry) -> None:
        """Remove an entry from MLflow and the disk, so that a repeated command finds what a kill left.

        In an MLflow store that others may use, only the runs of this folder are deleted.
        """
        self.require_removable(entry)
        shared = entry.tracked and not self.has_store
        for run_id in self.find_diagnoses(entry):
            Tracker(self.uri, DIAGNOSES).delete_run(run_id)
        for run_id in self._find_own_runs(entry) if shared else ():
            Tracker(self.uri, entry.name).delete_run(run_id)
        delete(entry.folder, self.path)  # only the folder leads to those runs
        if entry.tracked and not shared:
            Tracker(self.uri, entry.name).remove_experiment()
            delete(entry.artifacts, self.path)

    def _find_own_runs(self, entry: RunsEntry) -> list[str]:
        """Ids of the MLflow runs of an entry's folder, without those of cells, whose parent runs lead to them."""
        tracker, file = Tracker(self.uri, entry.name), entry.folder / GRID_ID
        found = tracker.find({"grid": file.read_text(encoding="utf-8")}) if file.exists() else []
        if entry.kind == "training":  # those of an earlier version have no id of their folder
            named = {read_run_address(folder)[0] for folder in entry.run_folders}
            found += [run for run in tracker.find({"kind": "run"}) if run.info.run_id in named]
        return list({run.info.run_id: None for run in found})

    def find_diagnoses(self, entry: RunsEntry) -> list[str]:
        """Ids of the MLflow runs of a diagnosis's folder; none in a shared store, where others' have the same name."""
        if entry.kind != "diagnosis" or entry.tracked or not (self.has_store and DIAGNOSES in self.entries):
            return []
        tracker = Tracker(self.uri, DIAGNOSES)
        return [run.info.run_id for run in tracker.find({"mlflow.runName": entry.name})]

    def find_garbage(self, models: bool = False) -> dict[Path, str]:
        """What no table, report or run that resumes needs, and why.

        models: also the trained models that --keep-checkpoint kept of cells, except those that unfinished cells start
        from. Raises a one-line ValueError if a living process uses the entry of one of them.
        """
        found = self._find_in_runs(models)
        for entry in self.entries.values():
            if entry.kind == "other" or entry.grid is not None or entry.tracked:
                continue
            inside = (entry.folder, *entry.folder.rglob("*"))  # a link may lead to what is worth keeping
            if not any(path.is_symlink() or any(map(path.match, WORTH)) for path in inside):
                found[entry.folder] = "no results, and unknown to MLflow"
        found |= dict.fromkeys(find_leftovers(self.path), LEFTOVER)
        for name in {path.relative_to(self.path).parts[0] for path in found} & self.entries.keys():
            self.require_unused(self.entries[name])
        return found

    def _find_in_runs(self, models: bool) -> dict[Path, str]:
        """Checkpoints beside results, which a killed process left, and models."""
        cells = [cell for entry in self.entries.values() if entry.grid is not None for cell in entry.grid.cells]
        unfinished = [cell for cell in cells if cell.status != "complete"]
        models = models and all(cell.settings for cell in unfinished)  # one that has not begun does not tell its start
        known = [entry for entry in self.entries.values() if entry.kind != "other"]
        asked = [read_settings(run) for entry in known for run in entry.run_folders if RunResult.peek(run) is None]
        searches = [file for entry in known if (file := entry.folder / DEFINITION).exists()]
        asked += [json.loads(file.read_bytes())["base"] for file in searches]
        starts = {Path(str(settings.get("init_from"))).resolve() for settings in asked}
        found: dict[Path, str] = {}
        for entry in self.entries.values():
            for run in entry.run_folders if entry.kind != "other" else ():
                left, model = run / CHECKPOINTS, run / FINAL_CHECKPOINT
                spare = models and entry.kind != "training" and model.exists() and model.resolve() not in starts
                here = {left: "checkpoints of a finished run"} if left.exists() else {}
                here |= {model: "model of a finished cell"} if spare else {}
                if here and RunResult.peek(run) is not None:
                    found |= here
        return found

    def collect(self, path: Path, why: str) -> None:
        """Remove what `find_garbage` found. Raises a one-line ValueError if a process uses the run folder."""
        if why == LEFTOVER:
            remove_unused(path)  # unless a process took it meanwhile
        elif path.name not in (CHECKPOINTS, FINAL_CHECKPOINT):
            delete(path, self.path)
        else:
            run = path.parent
            with hold(run) as is_free:
                if not is_free:
                    raise ValueError(f"{str(run)!r}: is in use by a training; wait for its end")
                if path.name == CHECKPOINTS:
                    keep_quarantined(run)
                delete(path, self.path)
