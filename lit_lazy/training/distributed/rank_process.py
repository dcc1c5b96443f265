"""A process that takes its share of a run's batches, and nothing else: what a rank beside rank 0 does."""

import sys

from lightning.pytorch.loggers.logger import DummyLogger

from lit_lazy.config.files import load_module
from lit_lazy.config.schema import RunConfig
from lit_lazy.config.serialisation import from_dict
from lit_lazy.support.errors import UnfinishedError
from lit_lazy.training.distributed.process_group import RankGroup, connect_to_group, exit_on_eof
from lit_lazy.training.execution import Execution
from lit_lazy.training.head_monitor import HeadMonitor
from lit_lazy.training.prepare import load_data
from lit_lazy.training.trainer import MissedValidation, build_module, fit, make_trainer


def join_training(group: RankGroup) -> None:
    """Train what rank 0 says, to the end or an error, of which rank 0 hears."""
    try:
        _join_training(group)
    except Exception as error:
        group.report_failure(error)
        raise


def _join_training(group: RankGroup) -> None:
    orders = group.receive_spec()
    for file in orders.files:
        load_module(file)
    cfg, execution = from_dict(RunConfig, orders.config), Execution(**orders.execution)
    source = load_data(cfg.data)
    if source.fingerprint != orders.fingerprint:
        raise ValueError(f"its data ({source.name}) are not those of rank 0; give it the same files")
    logger, callbacks = None, ()
    if execution.strategy == "fsdp":  # rank 0 cannot look at the model alone
        logger, watch = DummyLogger(), HeadMonitor(source)
        callbacks = (MissedValidation(source, watch.losses), watch)
    trainer = make_trainer(cfg, orders.folder, logger, callbacks, False, execution, group)
    fit(trainer, build_module(cfg, source, execution), cfg, source, orders.checkpoint, group, orders.final)


def main() -> int:
    """Entry point of the processes that rank 0 starts; their place comes on the standard input."""
    place = sys.stdin.readline()
    exit_on_eof(sys.stdin.fileno())
    try:
        join_training(connect_to_group(place))
    except UnfinishedError:
        return 1  # rank 0 has met it too
    return 0


if __name__ == "__main__":
    sys.exit(main())
