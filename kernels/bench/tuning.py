"""Block sizes timed anew at every point, and which were chosen.

Triton keeps what its tuner chose by size, in memory and on disk: the first share of empty tiles would choose for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton import Config
from triton.runtime.autotuner import Autotuner

from flash_lazy.fused import configurations

_forgotten: list[Autotuner] = []
"""Tuners that have run since `forget`, and so forgot what they knew before."""
_running: list[Autotuner] = []
"""Tuners that have run since `watch`."""
_run = Autotuner.run


def install() -> None:
    """From now on in this process, tuners choose anew after each `forget`; compiled kernels still come from disk."""
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
    """The next call of each kernel times its configurations again."""
    _forgotten.clear()


def watch() -> None:
    """From now on, what runs is somebody else's."""
    _running.clear()


def list_chosen_blocks() -> dict[str, dict[str, Any]]:
    """By kernel that has run since `watch`: the best configuration, and every one's milliseconds.

    None is the time of a configuration that does not fit into the device.
    """
    found = {}
    for tuner in _running:
        times = {_format_config(config): times[0] for config, times in getattr(tuner, "configs_timings", {}).items()}
        if times:  # else there was nothing to choose
            finite = {text: time if time < float("inf") else None for text, time in times.items()}
            best = min(times, key=times.__getitem__)
            found[tuner.base_fn.__name__.removesuffix("_kernel")] = {"blocks": best, "milliseconds": finite}
    return found


def _format_config(config: Config) -> str:
    constants = ", ".join(f"{name} {value}" for name, value in config.kwargs.items())
    return f"{constants}, {config.num_warps} warps, {config.num_stages} stages"


@contextmanager
def use_choice(index: int) -> Iterator[None]:
    """Inside, every kernel takes one of its list (the index counts round and round), and nothing is timed."""
    given = configurations.choices

    def one(*arguments: Any) -> list[configurations.Blocks]:
        blocks = given(*arguments)
        return blocks[index % len(blocks) :] + blocks[: index % len(blocks)]

    with patch.multiple(configurations, AUTOTUNE=False, choices=one):
        yield
