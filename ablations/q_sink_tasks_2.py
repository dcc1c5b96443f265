"""How much does the chain matter to what q_sink says? Five chains. Second attempt, with looks."""

from dataclasses import replace

from q_mask_2 import REMOVED, removed
from q_sink_tasks import TASKS
from q_sink_tasks import question as first

from lit_lazy.grid.question import Question

question = Question(
    ablation=replace(first.ablation, name="q_sink_tasks_2", seeds=tuple(range(100, 180))),
    claim="Whatever the chain, Elastic-Softmax leaves less than a quarter of the sink that softmax has.",
    primary="sink/first_key_weight_non_trigger",
    contrasts=tuple(removed(f"task {task}", f"elastic task {task}", f"softmax task {task}") for task in TASKS),
    rule="mostly",
    margin=REMOVED,
    source="R4",
    looks=(10, 20, 40, 80),
    after="q_sink_tasks",
)
