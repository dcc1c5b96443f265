"""My metric: a measurement of a trained model; this one is the weight that queries give their own key.

`lit-lazy train my_metric.py` measures it at the end. Give it a file of its own: a rule's key covers its whole file.
"""

from dataclasses import dataclass

import torch

from lit_lazy.config import experiment, replace_at
from lit_lazy.config.evaluation import Evaluation
from lit_lazy.measure.diagnostics import evaluation_mode, hook_layers, sample_validation
from lit_lazy.table.records import Column


@dataclass(frozen=True)
class MyMetric(Evaluation):
    # Each field is part of the key of what it measures.
    sequences: int = 16

    def measure(self, model, data):
        """Metrics by name, of a trained model and the settings of its data."""
        (batch,) = sample_validation(data.load(), self.sequences)
        found = []

        def on_attention(_layer, attention, call):  # of each layer; `call` has queries, keys and values
            # Change from here on.
            w = attention.normaliser.compute_weights(call).w  # [B, H, L, L]
            found.append(w.diagonal(dim1=-2, dim2=-1).mean())

        batch = {name: x.to(model.device) for name, x in batch.items()}
        with torch.no_grad(), evaluation_mode(model), hook_layers(model, on_attention):
            model(batch["tokens"], place=batch.get("place"))  # of documents: then B = 1 and L holds all of them
        return {"my_metric/own_key": torch.stack(found).mean().item()}


# Of a table: Ablation(common={"evaluations": (MyMetric(),)}, columns=(*COLUMNS, COLUMN), ...)
COLUMN = Column("my_metric/own_key", "own-key weight", plotted=True)  # in the short table and figures too


def config():
    # The experiment to train, with further changes by dotted path; this one takes seconds and says nothing.
    return replace_at(experiment("backcopy_tiny"), {"evaluations": (MyMetric(),)})
