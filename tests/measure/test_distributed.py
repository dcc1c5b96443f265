"""Metrics over two processes of a real process group equal those of one process on all data."""

from typing import Any

import torch
from layers import layer_shape
from torch import distributed, multiprocessing
from torchmetrics import Metric

from lit_lazy.attention import AttentionCall, Elastic
from lit_lazy.measure.attention_metrics import RatioOfSums
from lit_lazy.measure.collapse_and_sink_kinds import Collapse
from lit_lazy.measure.head_metrics import Entropy, Mass, Sink, Sparsity, Spread, ValueNorms
from lit_lazy.measure.row_statistics import summarise

PROCESSES = 2
SEQUENCES, HEADS, LENGTH = 5, 4, 70


def measured(sequences):
    """Values of every metric on some sequences and, in a group, on those of the other processes."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, SEQUENCES, HEADS, LENGTH, 8, generator=generator)
    normaliser = Elastic().build(layer_shape(HEADS, LENGTH))
    summary = summarise(normaliser, AttentionCall(q[sequences], k[sequences], v[sequences]))
    of_summary = (Sink(HEADS, LENGTH), Mass(HEADS, LENGTH), *(of(HEADS) for of in (Sparsity, Entropy, Spread)))
    reads: list[tuple[Metric, tuple[Any, ...]]] = [
        *((metric, (summary,)) for metric in of_summary),
        (ValueNorms(HEADS, LENGTH), (v[sequences],)),
        (Collapse(), (v[sequences, 0],)),
        (RatioOfSums(), (v[sequences] ** 2, torch.ones_like(v[sequences]))),
    ]
    found = []
    for metric, arguments in reads:
        torch.nn.ModuleList([metric]).bfloat16()
        assert {state.dtype for state in metric.metric_state.values()} == {torch.float64}, metric
        metric.update(*arguments)
        value = metric.compute()
        found.append(value if isinstance(value, dict) else {"ratio": value})
    return found


def take_part(rank, folder):
    """A process of the group. The first has one sequence, the other the rest."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{folder / 'group'}", rank=rank, world_size=PROCESSES)
    try:
        torch.save(measured(slice(0, 1) if rank == 0 else slice(1, None)), folder / f"{rank}.pt")
    finally:
        distributed.destroy_process_group()


def test_a_process_group_measures_what_one_process_does(tmp_path):
    multiprocessing.start_processes(take_part, (tmp_path,), nprocs=PROCESSES, start_method="fork")
    expected = measured(slice(None))
    alone = measured(slice(1, None))
    assert any(not alone[0][name].equal(value) for name, value in expected[0].items())
    for rank in range(PROCESSES):
        for found, whole in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            assert found.keys() == whole.keys()
            for name, value in whole.items():
                torch.testing.assert_close(found[name], value, equal_nan=True, rtol=1e-6, atol=1e-9, msg=name)
