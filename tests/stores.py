"""Databases that tests replace."""

import gc

import sqlalchemy


def forget_databases() -> None:
    """Close this process's connections to database files, of which one was replaced."""
    for engine in gc.get_objects():
        if type(engine) is sqlalchemy.Engine:
            engine.dispose()
