"""How much does the chain matter to what q_sink says? Five chains. Second attempt, with looks."""

from q_mask_2 import REMOVED, RULES, removed

from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS

TASKS = (1, 2, 3, 4, 5)
"""Seeds of the chain and of the sequences; 0 is that of all other tables."""

question = Question(
    ablation=Ablation(
        name="q_sink_tasks_2",
        baseline="softmax task 1",
        seeds=tuple(range(100, 180)),
        columns=COLUMNS,
        rows=tuple(
            Row(f"{name} task {task}", {"model.attention.normaliser": rule, "data.task_seed": task}, source="ours")
            for task in TASKS
            for name, rule in RULES.items()
        ),
    ),
    claim="Whatever the chain, Elastic-Softmax leaves less than a quarter of the sink that softmax has.",
    primary="sink/first_key_weight_non_trigger",
    contrasts=tuple(removed(f"task {task}", f"elastic task {task}", f"softmax task {task}") for task in TASKS),
    rule="mostly",
    margin=REMOVED,
    source="R4",
    looks=(10, 20, 40, 80),
    after="q_sink_tasks",
)
