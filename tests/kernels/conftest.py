"""The backends, a stub of torch.cuda, and a faster interpreter of Triton."""

import functools
import os
from types import SimpleNamespace

import numpy as np
import pytest


@pytest.fixture
def on_cpu(monkeypatch):
    """torch.cuda stubbed in this process."""
    import without_gpu  # it needs triton, which is for Linux

    without_gpu.install(monkeypatch.setattr)


@pytest.fixture(params=["reference", "chunked", "cpu", "triton"])
def backend(request, monkeypatch):
    """Each backend, the fused kernels in small blocks."""
    from kernel_cases import require_library, use_small_blocks

    if request.param == "cpu":
        require_library()
    if request.param == "triton":
        use_small_blocks(monkeypatch, 16, 16)
    return request.param


@pytest.fixture(autouse=True, scope="session")
def _fast_interpreter():
    """Patch Triton's language once, not at each call of a device function, and reduce row by row."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    language = pytest.importorskip("triton.language", reason="the fused kernels need triton, which is for Linux")
    from triton.runtime import interpreter

    for module in (language, language.core):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": module}))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    interpreter.ReduceOps.generic_reduce = _reduce


def _reduce(self, inputs):
    """Combine the rows of several tensors; the interpreter's own combines number by number."""
    rows = zip(*(np.moveaxis(x.handle.data, self.axis, 0) for x in inputs), strict=True)
    tensors = (tuple(self.to_tensor(row, x.dtype) for row, x in zip(each, inputs, strict=True)) for each in rows)
    return functools.reduce(lambda found, row: self.combine_fn.fn(*found, *row), tensors)
