"""How much does the chain matter to what q_sink says? Softmax and Elastic-Softmax with RoPE on five chains."""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

TASKS = (1, 2, 3, 4, 5)
"""Seeds of the chain and of the sequences; 0 is that of all other tables."""
RULES = {"softmax": Softmax(), "elastic": Elastic()}

question = Question(
    ablation=Ablation(
        name="q_sink_tasks",
        baseline="softmax task 1",
        seeds=(10, 11, 12, 13, 14),
        columns=COLUMNS,
        rows=tuple(
            Row(f"{name} task {task}", {"model.attention.normaliser": rule, "data.task_seed": task}, source="ours")
            for task in TASKS
            for name, rule in RULES.items()
        ),
    ),
    claim="Elastic-Softmax removes the sink that softmax has, whatever the chain.",
    primary="sink/first_key_weight_non_trigger",
    contrasts=tuple(
        Contrast(f"task {task}", {f"elastic task {task}": 1, f"softmax task {task}": -1}) for task in TASKS
    ),
    rule="removed",
    margin=0.1,
    source="R4",
    fixed_rules=True,
)
