"""MQAR in the hardest setting of zoology's figure 2, for a GPU: two layers with one head (docs/method.md, section 8).

**This project has not run it at this size.** The easier settings are `--data.context_length=64 --data.pairs=4
--train.batch_size=512 --train.steps=12500`, and 128, 8, 512, 12500 or 256, 16, 256, 25000. Widths are 64, 128, 256 and
512; four learning rates from 1e-4 to 1e-2. Zoology's models have no MLP and a dropout of 0.1, these have a SwiGLU and
no dropout. Its learning rate falls to 0 per epoch, here per step.
"""

from lit_lazy.attention import LearnedAbsolute
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.mqar import Mqar


def config() -> RunConfig:
    return RunConfig(
        data=Mqar(vocab_size=8_192, context_length=512, pairs=64, train_sequences=100_000, validation_sequences=3_000),
        model=ModelConfig(d_model=128, n_layers=2, n_heads=1, d_ff=256, position=LearnedAbsolute()),
        train=TrainConfig(
            steps=50_000,  # 64 passes
            batch_size=128,
            lr=1e-3,
            warmup_steps=0,
            final_lr_fraction=0.0,
            weight_decay=0.1,
            betas=(0.9, 0.999),
            val_every=2_000,
            checkpoint_every=2_000,
        ),
    )
