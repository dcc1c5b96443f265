"""The weights of a source as a state dict of this project's decoder."""

import torch
from torch import Tensor

from lit_lazy.config.schema import ModelConfig
from lit_lazy.model.decoder import DecoderLM
from lit_lazy.model.import_.published import PublishedModel, Weight
from lit_lazy.support.memory import require_memory

EMBEDDING, HEAD = "embedding.weight", "head.weight"


def check_weights(source: PublishedModel, cfg: ModelConfig, vocab_size: int, context_length: int) -> None:
    """Raises a one-line ValueError unless the source has the model's tensors, no others, and they fit into memory."""
    if cfg.n_layers > len(source.weights):  # before so many layers are built
        raise ValueError(f"num_hidden_layers={cfg.n_layers}: the files have only {len(source.weights)} tensors")
    with torch.device("meta"):
        expected = DecoderLM(cfg, vocab_size, context_length, seed=None).state_dict()
    if cfg.tie_embeddings and HEAD not in source.weights:
        del expected[HEAD]
    if missing := sorted(expected.keys() - source.weights.keys()):
        raise ValueError(f"{missing[0]}: is missing, one of {len(missing)}; the files are incomplete")
    if surplus := sorted(source.weights.keys() - expected.keys()):
        raise ValueError(f"{surplus[0]}: is not known, one of {len(surplus)} tensors; the model is of another family")
    for name, value in expected.items():
        if (shape := source.weights[name].shape) != tuple(value.shape):
            raise ValueError(f"{name}: has shape {list(shape)}, and by the settings {list(value.shape)}")
    sizes = {"model.d_model": cfg.d_model, "model.n_layers": cfg.n_layers, "vocabulary": vocab_size}
    require_memory(sizes, count_bytes(source))


def count_bytes(source: PublishedModel) -> int:
    """Size of the weights as float32."""
    return sum(4 * torch.Size(weight.shape).numel() for weight in source.weights.values())


def read_weights(source: PublishedModel, cfg: ModelConfig) -> dict[str, Tensor]:
    """The state dict of the decoder, float32. Raises a one-line ValueError for weights that are not finite."""
    state = {name: _read(name, weight) for name, weight in source.weights.items()}
    if cfg.tie_embeddings:
        if not torch.equal(state.get(HEAD, state[EMBEDDING]), state[EMBEDDING]):
            raise ValueError("tie_word_embeddings=True: the output head is not the embedding; set it to false")
        state[HEAD] = state[EMBEDDING]
    return state


def _read(name: str, weight: Weight) -> Tensor:
    read = torch.empty(weight.shape)
    done = 0
    for block in weight.blocks():
        if not torch.stack(block.aminmax()).isfinite().all():  # unlike block.isfinite(), without a copy
            raise ValueError(f"{name}: is not finite")
        read[done : done + len(block)] = block
        done += len(block)
    return read
