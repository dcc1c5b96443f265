"""Block sizes timed anew for every peer at every point, and which were chosen.

Triton keeps what its tuner chose by size, in memory and on disk: the first share of empty tiles would choose for all.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton import Config
from triton.runtime.autotuner import Autotuner

from flash_lazy.fused import configurations

_timed: list[Autotuner] = []


def install() -> None:
    """From now on in this process, no choice is read from disk; compiled kernels still are."""
    patch.object(Autotuner, "check_disk_cache", _time).start()


def _time(tuner: Autotuner, key: tuple[Any, ...], configs: Sequence[Config], bench: Callable[[], None]) -> bool:  # noqa: ARG001
    bench()
    _timed.append(tuner)
    return False


def forget() -> None:
    """The next call of each kernel times its configurations again."""
    for tuner in _timed:
        tuner.cache.clear()
    _timed.clear()


def chosen() -> dict[str, dict[str, Any]]:
    """By kernel timed since `forget`: the best blocks (M x N, warps, stages), and every configuration's milliseconds.

    None is the time of a configuration that does not fit into the device.
    """
    found = {}
    for tuner in _timed:
        times = {_text(config): times[0] for config, times in tuner.configs_timings.items()}
        name = tuner.base_fn.__name__.removesuffix("_kernel")
        best = min(times, key=times.__getitem__)
        finite = {text: time if time < float("inf") else None for text, time in times.items()}
        found[name] = {"blocks": best, "milliseconds": finite}
    return found


def _text(config: Config) -> str:
    return f"{config.kwargs['BLOCK_M']} x {config.kwargs['BLOCK_N']}, {config.num_warps}, {config.num_stages}"


@contextmanager
def choice(index: int) -> Iterator[None]:
    """Inside, every kernel takes one of its list (the index counts round and round), and nothing is timed."""
    given = configurations.choices

    def one(*arguments: Any) -> list[configurations.Blocks]:
        blocks = given(*arguments)
        return blocks[index % len(blocks) :] + blocks[: index % len(blocks)]

    with patch.multiple(configurations, AUTOTUNE=False, choices=one):
        yield
