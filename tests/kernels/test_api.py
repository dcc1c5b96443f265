"""Every invalid argument raises one line that names it, its value and the fix."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_cases import assert_refused, device_for, require_library, widest_dtype

from flash_lazy import api, attention_weights, lazy_attention, resolve_backend, rule_weights
from flash_lazy.call import Call
from flash_lazy.cpu import library
from flash_lazy.fused import ops

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 6, 8)
TAU = torch.ones(4)
MASK = torch.ones(2, 6, dtype=torch.bool)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def call(**changes):
    return lazy_attention(**({"q": Q, "k": K, "v": K, "tau": TAU} | changes))


PACKED = {"q": Q[:1], "k": K[:1], "v": K[:1]}
DOUBLE = {"q": Q.double(), "k": K.double(), "v": K.double()}

# Changes of a valid call, and the required parts of the message: argument, value, fix.
WRONG = {
    "k without keys": ({"k": K[:, :, :0]}, ["k has shape [2, 2, 0, 8]", "at least 1"]),
    "k of another dtype": ({"k": K.double()}, ["k is torch.float64", "q is torch.float32", "one dtype"]),
    "k on another device": ({"k": K.to("meta")}, ["k is on meta", "q on cpu", "one device"]),
    "v unlike k": ({"v": K[..., :4]}, ["v has shape [2, 2, 6, 4]", "[2, 2, 6, 8]"]),
    "heads no multiple": ({"q": Q[:, :3], "tau": TAU[:3]}, ["k has 2 heads", "q 3", "multiple"]),
    "more rows than keys": (
        {"k": K[:, :, :5], "v": K[:, :, :5]},
        ["q has 6 rows", "Lq <= Lk", "[batch, heads, "],
    ),
    "tau without positions": ({"threshold": "per_token"}, ["tau has shape [4]", "per_token", "[H, N]"]),
    "tau elsewhere": ({"tau": TAU.to("meta")}, ["tau is on meta", "q on cpu"]),
    "bias per kv head": ({"bias": torch.zeros(2, 5)}, ["bias has shape [2, 5]; give [H, W], H = 4"]),
    "unknown threshold": ({"threshold": "row"}, ["threshold is 'row'", "per_query, seq_len, per_token, constant"]),
    "seq_len alone": ({"threshold": "seq_len"}, ["context_length is None", "seq_len"]),
    "packed batch": ({"cu_seqlens": ints(0, 6)}, ["cu_seqlens needs B = 1", "[2, 4, 6, 8]"]),
    "cu_seqlens falling": (PACKED | {"cu_seqlens": ints(0, 4, 3, 6)}, ["cu_seqlens is [0, 4, 3, 6]", "rise"]),
    "packed and ragged": (PACKED | {"cu_seqlens": ints(0, 6), "kv_lengths": ints(6)}, ["kv_lengths and cu_seqlens"]),
    "kv_lengths too long": ({"q": Q[:, :, :3], "kv_lengths": ints(6, 7)}, ["kv_lengths is [6, 7]", "0 to Lk = 6"]),
    "float key_mask": ({"key_mask": MASK.float()}, ["key_mask is torch.float32", "bool [B, Lk] = [2, 6]"]),
    "key_mask elsewhere": ({"key_mask": MASK.to("meta")}, ["key_mask is on meta", "q on cpu"]),
    "empty window": ({"window": 0}, ["window is 0", "at least 1"]),
    "a learned scale": ({"scale": torch.tensor(0.3)}, ["scale is a Tensor", "no gradient", "a finite number"]),
    "renormalise in words": ({"renormalise": "no"}, ["renormalise is 'no'", "True or False"]),
    "an 8-bit float": ({"q": Q.to(torch.float8_e4m3fn)}, ["q is torch.float8_e4m3fn", "give float16"]),
    "too wide a bias": ({"bias": torch.zeros(1).expand(4, 2**29)}, ["bias has shape [4, 536870912]", "2**31"]),
    "an array": ({"key_mask": np.ones((2, 4, 60, 8))}, ["key_mask is a numpy.ndarray; give a tensor"]),
    "sparse q": ({"q": Q.to_sparse()}, ["q is a sparse_coo tensor; give a dense one"]),
    "nested q": ({"q": torch.nested.nested_tensor(list(Q), layout=torch.jagged)}, ["q is a nested tensor"]),
    "an array as a window": ({"window": np.ones((60, 8))}, ["window is array", "...; "]),
    "long cu_seqlens": (PACKED | {"cu_seqlens": ints(*range(300))}, ["cu_seqlens is [0, 1, 2", "...; "]),
    "unknown backend": ({"backend": "fused"}, ["backend is 'fused'", "auto, reference, chunked, cpu, triton"]),
    "compiled float64": (DOUBLE | {"backend": "cpu"}, ["backend is 'cpu' and q torch.float64", "give float32"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_error_names_argument_value_and_fix(name):
    changes, expected = WRONG[name]
    assert_refused(lambda: call(**changes), expected)


MACHINES = {
    "AMD": ("torch.version.hip", "7.0", "is tested only on NVIDIA GPUs, and cuda:0 is an AMD one"),
    "Volta": ("torch.cuda.get_device_capability", lambda _: (7, 0), "needs compute capability 8.0"),
    "triton": ("flash_lazy.fused.ops._read_triton_version", lambda: (3, 5), "needs triton 3.6, and 3.5 is installed"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_cannot_run_the_kernels_is_named(name, monkeypatch):
    pytest.importorskip("triton", reason="the fused kernels need triton, which is for Linux")
    what, value, expected = MACHINES[name]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    q = SimpleNamespace(device=torch.device("cuda:0"), dtype=torch.bfloat16, shape=(1, 1, 4, 64))
    assert resolve_backend("auto", q) == "triton"
    monkeypatch.setattr(what, value)
    with pytest.raises(ValueError, match=f"backend is 'triton', which {expected}.*; choose 'chunked'"):
        resolve_backend("triton", q)
    api._warn_about_fallback.cache_clear()
    with pytest.warns(UserWarning, match=expected) as caught:
        assert [resolve_backend("auto", q) for _ in range(3)] == ["chunked"] * 3
    assert len(caught) == 1


def test_more_sequences_than_a_grid_has_places_are_not_decoded():
    for batch, decoded in ((2**16 - 1, True), (2**16, False)):
        q, k = torch.empty(batch, 1, 1, 16, device="meta"), torch.empty(batch, 1, 9, 16, device="meta")
        assert ops._is_decoding(Call(q, k, k, torch.ones(1))) == decoded


def test_weights_of_tensors_without_values_are_refused():
    q, k, tau = (x.to("meta") for x in (Q, K, TAU))
    for compute in (lambda: attention_weights(q, k, tau), lambda: rule_weights(lambda s, _: s.softmax(-1), q, k)):
        assert_refused(compute, ["q is on meta", "move q, k and v to a device"])


def test_tau_may_stay_float32():
    assert call(**DOUBLE).dtype == torch.float64


def test_a_padded_batch_is_not_shifted_in_silence():
    """Users of flash-attention's lengths might call it so, and row 2 of 6 would be aligned like row 6 of 3 + 3."""
    refused = "kv_lengths is given with as many queries as keys (6)"
    assert_refused(lambda: call(kv_lengths=ints(6, 3)), [refused, "leave it out for right padding"])
    one = {"q": Q[:, :, :1], "k": K[:, :, :1], "v": K[:, :, :1]}
    assert call(**one, kv_lengths=ints(1, 0)).shape == one["q"].shape


def test_auto_on_a_cpu_is_the_compiled_backend_where_it_supports_the_call(monkeypatch):
    require_library()
    monkeypatch.delenv(library.SWITCH, raising=False)
    names = [resolve_backend("auto", Q.to(dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    assert names == ["cpu", "chunked", "chunked"]
    monkeypatch.setattr(library, "find_obstacle", lambda: "there is none")
    assert resolve_backend("auto", Q) == "chunked"


def test_why_the_compiled_backend_does_not_run_is_named(monkeypatch):
    monkeypatch.setenv(library.SWITCH, "0")
    why = "switched off by FLASH_LAZY_CPU=0; unset it, or choose 'chunked'"
    with pytest.raises(ValueError, match=f"backend is 'cpu', but the compiled backend is {why}$"):
        call(backend="cpu")
    monkeypatch.delenv(library.SWITCH)
    api._warn_about_fallback.cache_clear()
    monkeypatch.setattr(library, "get_instruction_set", lambda: None)
    library._describe_absence.cache_clear()
    why = "no compiled backend is installed for this processor; .*, or choose 'chunked'$"
    with pytest.raises(ValueError, match=f"^backend is 'cpu', but {why}"):
        call(backend="cpu")
    with pytest.warns(UserWarning, match="flash_lazy runs 'chunked' on a CPU"):
        assert resolve_backend("auto", Q) == "chunked"


def test_scale(backend):
    generator, dtype = torch.Generator().manual_seed(0), widest_dtype(backend)
    device = device_for(backend)
    q, k, v = (torch.randn(x.shape, generator=generator, dtype=dtype).to(device) for x in (Q, K, K))
    same = {"k": k, "v": v, "tau": TAU.to(device), "backend": backend}
    torch.testing.assert_close(call(q=q, scale=0.3, **same), call(q=q * 0.3, scale=1.0, **same))
    torch.testing.assert_close(call(q=q, **same), call(q=q, scale=8**-0.5, **same))
