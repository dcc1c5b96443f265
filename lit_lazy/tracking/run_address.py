"""The file by which a run folder names its run in MLflow."""

from pathlib import Path

from lit_lazy.support.disk import write_text

RUN_ID = "mlflow_run_id"
"""The file, with the run's id and that of its experiment; the second is missing in files of former versions."""


def write_run_address(folder: Path, run_id: str, experiment_id: str) -> None:
    """Name the run of a run folder."""
    write_text(folder / RUN_ID, f"{run_id} {experiment_id}")


def read_run_id(folder: Path) -> str:
    """The id of a run folder's run; "" if it is not known."""
    return (_read(folder) or [""])[0]


def read_run_address(folder: Path) -> tuple[str, str] | None:
    """The ids of a run folder's experiment and run; None if one is not known."""
    known = _read(folder)
    return (known[1], known[0]) if len(known) == 2 else None


def _read(folder: Path) -> list[str]:
    file = folder / RUN_ID
    return file.read_text(encoding="utf-8", errors="replace").split() if file.exists() else []
