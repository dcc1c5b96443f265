"""From real text to a model that transformers loads, by the commands of docs/scale.md."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from torch_alone import ROOT

from lit_lazy.command.main import main

FILES = 40
DATA = ["--data.context_length=64", "--data.document_mask=True", "--data.validation_windows=16"]
SIZES = ["--model.d_model=32", "--model.n_layers=2", "--model.n_heads=2", "--model.d_ff=64"]
RECIPE = ["--train.steps=120", "--train.lr=1e-2", "--train.warmup_steps=5", "--train.batch_size=8"]
LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer("import ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0][prompt["input_ids"].shape[1]:]))
"""


@pytest.mark.long
@pytest.mark.usefixtures("offline", "forked_ranks", "runs")
def test_text_to_tokens_to_a_model_to_benchmarks_to_weights(tmp_path, task_folder, monkeypatch, capsys) -> None:
    """Tokenise Python's standard library, train on two processes, run benchmarks, generate, export, load."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "scale.md").read_text()
    (corpus,) = re.findall(r"^```python\n(\"\"\"Documents.*?)^```", page, re.M | re.S)
    (tmp_path / "library").mkdir()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:FILES]:
        shutil.copy(file, tmp_path / "library")
    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda _: str(tmp_path / "library"))
        exec(compile(corpus, "scale.md", "exec"), {})

    (commands,) = re.findall(r"^```sh\n(lit-lazy tokenise stdlib_10m\n.*?)^```", page, re.M | re.S)
    smaller = {
        "tokenise": DATA,
        "train": [*DATA, *SIZES, *RECIPE, "--train.val_every=30"],
        "diagnose": ["--lengths", "128,256", "--sequences", "2"],
        "lm-eval": ["--task-folder", str(task_folder)],
        "generate": ["--tokens", "8", "--temperature", "0"],
        "export": [],
    }
    said = {}
    for line in commands.splitlines():
        _, name, *words = shlex.split(line)
        for checkpoint in tmp_path.glob("runs/train-stdlib_10m/*/final.ckpt"):
            words = [word.replace("KEY", checkpoint.parent.name) for word in words]
        capsys.readouterr()
        assert main([name, *words, *smaller.pop(name)]) == 0, line
        said[name] = capsys.readouterr().out
    assert not smaller

    (result,) = tmp_path.rglob("result.json")
    measured = json.loads(result.read_text())
    assert measured["metrics"]["loss/val"] < measured["metrics"]["init/loss/val"] - 1
    assert measured["execution"]["devices"] == 2
    assert "tokens" in said["tokenise"]
    assert len(json.loads((tmp_path / "scores.json").read_text())["tasks"]) == 9
    words = [sys.executable, "-c", LOADS, str(tmp_path / "stdlib-10m")]
    loaded = subprocess.run(words, capture_output=True, text=True, check=True)
    assert loaded.stdout.rstrip("\n") == said["generate"].rstrip("\n")
