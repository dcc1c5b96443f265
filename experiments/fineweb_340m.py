"""340M parameters on FineWeb-Edu: the recipe of the paper's tables.

    lit-lazy tokenise fineweb_340m          # once: 29 GB to download, 20 GB of tokens, about 6 core-hours
    lit-lazy train fineweb_340m

Data: FineWeb-Edu, sample-10BT (Penedo et al. 2024, arXiv 2406.17557): 9.67 million documents, about 10 billion tokens.
The recipe uses 16.1 billion tokens, 1.6 times the sample; `--data.hub_config=sample-100BT` has enough for one pass.
Tokenizer: fla-hub/gla-1.3B-100B, as in the authors' configuration (32,000 tokens, <s> before every document). Run
`hf download fla-hub/gla-1.3B-100B tokenizer.json` and rename it to gla-tokenizer.json, or set --data.tokenizer=FILE.

The authors' recipe (github.com/Fzkuji/flash-lazy-attention, training script and configuration; read, not run): width
1024, 24 layers, 16 heads, untied embeddings, RoPE; 524,288 tokens per step, 30,720 steps, AdamW (0.9, 0.95), peak 4e-4,
cosine to a tenth, 1,024 steps of warm-up, clipping at 1, decay 0.01 (0.1 in the table of Titans, arXiv 2501.00663, with
which the paper compares); documents concatenated and cut, without a mask; <s> before a document.
Our choices: SwiGLU of 2816, which gives 374M parameters with a bias table of 512; a context of 4,096 as in that table,
so 128 sequences per step; also </s> after every document; the sample; validation on 1 in 1,000 documents; seeds.
"""

from lit_lazy.attention import AttentionSpec, Elastic, LearnedBias, Rope
from lit_lazy.config import ModelConfig, RunConfig, TrainConfig
from lit_lazy.data.text import Text


def config() -> RunConfig:
    return RunConfig(
        data=Text(
            hub="HuggingFaceFW/fineweb-edu",
            hub_config="sample-10BT",
            tokenizer="gla-tokenizer.json",
            begin_of_text="<s>",
            end_of_text="</s>",
            validation_share=0.001,
            context_length=4096,
            validation_windows=256,
        ),
        model=ModelConfig(
            d_model=1024,
            n_layers=24,
            n_heads=16,
            d_ff=2816,
            attention=AttentionSpec(Elastic(), LearnedBias(512)),
            position=Rope(),
            tie_embeddings=False,
        ),
        train=TrainConfig(
            steps=30_720,
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
