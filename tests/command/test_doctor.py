"""`lit-lazy doctor` reports what is installed and missing, and `lit-lazy completion` completes in shells."""

import contextlib
import importlib.metadata
import io
import re
import subprocess
from pathlib import Path

import pytest

from flash_lazy.cpu import library
from lit_lazy.attention import Attention
from lit_lazy.command import doctor
from lit_lazy.command.main import main
from lit_lazy.training import devices


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requirements of the distribution, which a test fills in."""
    needed: list[str] = []
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    return needed


def test_versions_devices_and_backends(runs: Path, required: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    required += ["torch>=2.11", 'absent-for-windows>=1; sys_platform == "win32"']
    assert main(["doctor", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    for name in ("lit-lazy", "python", "torch", "triton", "lightning", "mlflow", "optuna", "datasets", "CPU", "GPU"):
        assert f"\n{name} " in f"\n{out}", name
    assert f"torch        {importlib.metadata.version('torch')}\n" in out
    assert re.search(r"^lazy         attention runs on (chunked|cpu \(\w+\)|triton)$", out, re.MULTILINE)
    assert f"tracking     sqlite:///{runs.resolve()}/mlflow.db\n" in out
    assert "absent" not in out
    assert out.endswith("Everything required is installed.\n")


def test_missing_packages_and_programs_are_reported_with_their_use(
    runs: Path, required: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extras and programs are optional; a missing requirement is an error."""
    monkeypatch.setattr(doctor, "which", lambda name: name != "chromium")
    required += ['no-such-package>=3; extra == "wandb"', 'torch<2; extra == "ray"', 'torch>=2; extra == "fla"']
    assert main(["doctor", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "  --logger wandb: no-such-package is not installed (needed: >=3); pip install 'lit-lazy[wandb]'\n" in out
    installed = importlib.metadata.version("torch")
    assert f"  grids on a Ray cluster (--launcher ray): torch is {installed} (needed: <2); pip install 'lit-laz" in out
    assert "  tests of pages and dashboards: the program chromium is not on the PATH\n" in out
    assert "RetNet" not in out
    required += ["numpy<1"]
    assert main(["doctor", "--runs", str(runs)]) == 1
    out = capsys.readouterr().out
    assert (
        f"errors:\n  numpy: is {importlib.metadata.version('numpy')} (needed: <1); pip install -r requirements.t" in out
    )
    assert "Everything" not in out


def test_the_compiled_backend_is_named_with_its_instruction_set(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find_obstacle", lambda: None)
    monkeypatch.setattr(devices, "get_instruction_set", lambda: "avx2")
    monkeypatch.setattr(Attention, "backend_name", lambda *_: "cpu")
    assert main(["doctor", "--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "lazy         attention runs on cpu (avx2)\n" in out
    assert "faster attention" not in out


def test_a_missing_compiled_backend_is_reported_with_the_fix(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.SWITCH, "0")
    assert main(["doctor", "--runs", str(runs)]) == 0
    assert f"  faster attention on CPUs: {library.find_obstacle()}\n" in capsys.readouterr().out


def test_a_store_that_does_not_answer_is_an_error(
    runs: Path,
    required: list[str],
    closed_port: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert required == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port}")
    assert main(["doctor", "--runs", str(runs)]) == 1
    assert f"errors:\n  MLFLOW_TRACKING_URI=http://127.0.0.1:{closed_port}: does not answer" in capsys.readouterr().out


def test_every_extra_has_a_use() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]\n")[1].split("\n\n")[0]
    assert {line.partition(" = ")[0] for line in extras.splitlines()} == doctor.USES.keys()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The completion script of bash."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", "bash"]) == 0
    path = tmp_path_factory.mktemp("completion") / "lit-lazy"
    path.write_text(out.getvalue())
    return path


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        (["tra"], {"train"}),
        (["ablate", "ru"], {"run"}),
        (["train", "backcopy_t"], {"backcopy_tiny", "backcopy_tuned"}),
        (["train", "backcopy", "--keep"], {"--keep-checkpoint"}),
        (["train", "backcopy", "--logger", "t"], {"tensorboard"}),
        (["ablate", "run", "table2_"], {"table2_grid"}),
        (["completion", "z"], {"zsh"}),
    ],
    ids=" ".join,
)
def test_bash_completes(typed: list[str], completed: set[str], script: Path) -> None:
    complete = f"source {script}; COMP_WORDS=(lit-lazy {' '.join(typed)}) COMP_CWORD={len(typed)}; _shtab_lit_lazy"
    done = subprocess.run(
        ["bash", "-c", f"{complete}; printf '%s\\n' \"${{COMPREPLY[@]}}\""], capture_output=True, text=True, check=True
    )
    assert {word.strip() for word in done.stdout.splitlines()} == completed


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    assert "lit-lazy" in out
    assert "--keep-checkpoint" in out or shell == "tcsh"
