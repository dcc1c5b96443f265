"""The owner of a training's run: the runs folder that started it.

Several people may train one configuration with one MLflow. A run that is retired for a new one must be their own.
"""

from pathlib import Path

from lit_lazy.support.locks import read_id
from lit_lazy.tracking.databases import sqlite_file
from lit_lazy.tracking.tracker import TrackedRun, Tracker

OWNER = "owner"
"""Tag of a run."""
OWNER_ID = "owner_id"
"""File in the runs folder."""


def read_owner(runs: Path) -> str:
    """The random id of a runs folder."""
    return read_id(runs / OWNER_ID)


def is_own(run: TrackedRun, owner: str, tracker: Tracker) -> bool:
    """Whether a run belongs to an owner, whose runs folder is the tracker's.

    Runs of earlier versions do not say. Those in the database of that folder are its own, of others nobody knows.
    """
    database = sqlite_file(tracker.uri)
    unsaid = owner if database and database.resolve().parent == tracker.runs.resolve() else ""
    return run.tags.get(OWNER, unsaid) == owner
