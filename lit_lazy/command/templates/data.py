"""My data: a source of token sequences, here ones that count upwards. `lit-lazy train my_data.py` trains on it."""

from dataclasses import dataclass

import torch

from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data import DataConfig, DataSource, TokenDataset, fingerprint


@dataclass(frozen=True)
class MyData(DataConfig):
    """Sequences that count upwards from a random start."""

    # Each field is an option, --data.FIELD, and part of a run's key; the text below it is its help.
    context_length: int = 16
    """Tokens in a sequence."""

    def load(self) -> DataSource:
        # Make or read the tokens: int64 `[sequences, context_length + 1]`, the same at every call.
        start = torch.randint(0, 32, (256, 1), generator=torch.Generator().manual_seed(0))
        sequences = (start + torch.arange(self.context_length + 1)) % 32
        train, validation = sequences[:192], sequences[192:]  # no sequence in both
        return DataSource(
            name="my_data",
            vocab_size=32,  # all tokens are below it
            context_length=self.context_length,
            fingerprint=fingerprint([train.numpy(), validation.numpy()]),  # other data, other runs
            info={"train_tokens": train.numel()},  # facts to keep with the results
            train=TokenDataset(train),
            validation=TokenDataset(validation),
        )


def config() -> RunConfig:
    # A small model and a short training, to be enlarged.
    train = TrainConfig(steps=20, batch_size=8, warmup_steps=2)
    return RunConfig(data=MyData(), model=ModelConfig(d_model=16, n_heads=2, d_ff=32), train=train)
