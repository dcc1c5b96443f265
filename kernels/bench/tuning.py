"""Tune block sizes again at every workload, and report the choices.

Triton caches its tuner's choice by size, in memory and on disk: the first share of empty tiles would decide for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton import Config
from triton.runtime.autotuner import Autotuner

from flash_lazy.fused import configurations

_forgotten: list[Autotuner] = []
"""Tuners that have run, with a cleared cache, since `forget`."""
_running: list[Autotuner] = []
"""Tuners that have run since `watch`."""
_run = Autotuner.run


def install() -> None:
    """Make the tuners of this process tune again after each `forget`; compiled kernels still come from disk."""
    patch.object(Autotuner, "run", _run_anew).start()


def _run_anew(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
    if tuner not in _forgotten:
        tuner.cache.clear()
        tuner.cache_results = False
        _forgotten.append(tuner)
    if tuner not in _running:
        _running.append(tuner)
    return _run(tuner, *args, **kwargs)


def forget() -> None:
    """Make each kernel time its configurations again at its next call."""
    _forgotten.clear()


def watch() -> None:
    """Start to collect the tuners for `list_chosen_blocks`."""
    _running.clear()


def list_chosen_blocks() -> dict[str, dict[str, Any]]:
    """Best configuration, and the milliseconds of all, of every kernel that has run since `watch`.

    The time of a configuration that does not fit into the device is None.
    """
    found = {}
    for tuner in _running:
        times = {_format_config(config): times[0] for config, times in getattr(tuner, "configs_timings", {}).items()}
        if times:  # otherwise there was only one configuration
            finite = {text: time if time < float("inf") else None for text, time in times.items()}
            best = min(times, key=times.__getitem__)
            found[tuner.base_fn.__name__.removesuffix("_kernel")] = {"blocks": best, "milliseconds": finite}
    return found


def _format_config(config: Config) -> str:
    constants = ", ".join(f"{name} {value}" for name, value in config.kwargs.items())
    return f"{constants}, {config.num_warps} warps, {config.num_stages} stages"


@contextmanager
def use_choice(index: int) -> Iterator[None]:
    """Inside, every kernel uses configuration `index` of its list (modulo its length), without tuning."""
    list_choices = configurations.list_choices

    def rotate_choices(*arguments: Any) -> list[configurations.Blocks]:
        blocks = list_choices(*arguments)
        return blocks[index % len(blocks) :] + blocks[: index % len(blocks)]

    with patch.multiple(configurations, AUTOTUNE=False, list_choices=rotate_choices):
        yield
