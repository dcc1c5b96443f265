import pytest


@pytest.fixture
def on_cpu(monkeypatch):
    """torch.cuda stubbed in this process."""
    import without_gpu  # it needs triton, which is for Linux

    without_gpu.install(monkeypatch.setattr)
