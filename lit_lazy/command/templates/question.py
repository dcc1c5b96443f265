"""My question: does Elastic-Softmax leave less weight on the first key?

Commit this file before `lit-lazy ablate run my_question.py`: a verdict on an uncommitted claim is exploratory.
"""

from lit_lazy.attention import Elastic, Softmax
from lit_lazy.grid.ablation import Ablation, Row
from lit_lazy.grid.question import Question
from lit_lazy.table.columns import COLUMNS
from lit_lazy.table.records import Contrast

question = Question(
    ablation=Ablation(
        name="my_question",  # names the folder of results, runs/NAME-BASE
        baseline="softmax",
        seeds=tuple(range(10, 20)),  # at least ten, whose results nobody has seen yet
        columns=COLUMNS,
        base="backcopy_tiny",  # the experiment; this one takes seconds and says nothing, `backcopy` takes minutes
        rows=(
            Row("softmax", {"model.attention.normaliser": Softmax()}, source="ours"),
            Row("elastic", {"model.attention.normaliser": Elastic()}, source="ours"),
        ),
    ),
    claim="Elastic-Softmax puts less weight on the first key than softmax.",  # the sentence that the verdict judges
    primary="sink/first_key_weight_non_trigger",  # the outcome that decides: the key of a column
    contrasts=(Contrast("elastic - softmax", {"elastic": 1, "softmax": -1}),),  # one to five; weights sum to 0
    rule="lower",  # what is claimed of every contrast: lower, higher, same, no_worse or removed (docs/method.md)
    margin=0.01,  # the largest difference that counts as none, in the outcome's unit; not for `removed`
    source="ours",  # where the question comes from
)
