"""760M parameters on FineWeb-Edu: our own size, with the recipe of `fineweb_340m`.

There is no public file of the authors for their 760M; width 1536, 24 layers, 16 heads and a SwiGLU of 4096 are ours:
778M parameters. The tables it belongs beside (Titans, arXiv 2501.00663) see 30 billion tokens: 61,440 steps, three
times what sample-10BT holds, hence the first 32 billion of sample-100BT. All else, sources included, is as there.
"""

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.text import Text


def config() -> RunConfig:
    return RunConfig(
        data=Text(
            hub="HuggingFaceFW/fineweb-edu",
            hub_config="sample-100BT",
            tokenizer="gla-tokenizer.json",
            begin_of_text="<s>",
            end_of_text="</s>",
            validation_share=0.001,
            context_length=4096,
            validation_windows=256,
            max_tokens=32_212_254_720,
        ),
        model=ModelConfig(
            d_model=1536,
            n_layers=24,
            n_heads=16,
            d_ff=4096,
            attention=AttentionSpec(Elastic(), LearnedBias(512)),
            position=Rope(),
            tie_embeddings=False,
        ),
        train=TrainConfig(
            steps=61_440,
            batch_size=128,
            lr=4e-4,
            warmup_steps=1_024,
            final_lr_fraction=0.1,
            weight_decay=0.01,
            precision="bf16",
            val_every=1_024,
            checkpoint_every=1_024,
        ),
    )
