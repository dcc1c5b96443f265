"""Process of a rank other than 0: trains on its share of a run's batches."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.config.user_files import load_module
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.training.callbacks_and_loggers import MissedValidation
from lit_lazy.training.execution import Execution
from lit_lazy.training.head_monitor import HeadMonitor
from lit_lazy.training.interrupts import Interrupts
from lit_lazy.training.prepare import load_data
from lit_lazy.training.ranks import RankGroup, exit_on_eof, join_torchrun
from lit_lazy.training.trainer import build_module, fit


def join_training(group: RankGroup) -> None:
    """Train what rank 0 sends. Reports an error to rank 0."""
    try:
        _train(group, group.receive_spec())
    except Exception as error:
        group.report_failure(error)
        raise


def _train(group: RankGroup, spec: Mapping[str, Any]) -> None:
    for file in spec["files"]:  # which define classes of the config
        load_module(Path(file))
    cfg, execution = from_dict(RunConfig, spec["config"]), Execution(**spec["execution"])
    source = load_data(cfg.data)
    if source.fingerprint != spec["fingerprint"]:
        raise ValueError(f"its data ({source.name}) differs from rank 0's; give it the same files")
    logger, callbacks = None, ()
    if execution.strategy == "fsdp":  # rank 0's callbacks run forward passes, in which all ranks must take part
        logger, monitor = DummyLogger(), HeadMonitor(source)
        callbacks = (MissedValidation(source, monitor.losses), monitor)
    module = build_module(cfg, source, execution)
    with Interrupts() as interrupts, interrupts.allow():  # torchrun sends its signals to every rank
        where = spec["checkpoint"], spec["final"]
        fit(module, source, Path(spec["folder"]), logger, callbacks, *where, group, interrupts)


def main() -> int:
    """Entry point of the processes that rank 0 starts."""
    exit_on_eof(sys.stdin.fileno())
    try:
        group = join_torchrun()
        assert group
        join_training(group)
    except UnfinishedError:
        return 1  # rank 0 has the same error
    except KeyboardInterrupt:
        return 0  # agreed upon with rank 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
