"""From text to a model that others load, by the commands of the documentation, on real text."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tokenizers

from lit_lazy.command.main import main

FILES = 40
LOADS = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
prompt = tokenizer("import ", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8, do_sample=False)[0][prompt["input_ids"].shape[1]:]))
"""


def tokenizer_of(texts: list[str], path: Path) -> Path:
    """A BPE of these texts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    made.save(str(path))
    return path


@pytest.mark.long
@pytest.mark.usefixtures("offline", "forked_ranks")
def test_text_to_tokens_to_a_model_to_benchmarks_to_weights(
    runs: Path,
    tmp_path: Path,
    task_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python's standard library: tokenised, trained on by two processes, judged, continued, exported, loaded."""
    monkeypatch.setenv("LIT_LAZY_CACHE", str(tmp_path / "cache"))
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    texts = [path.read_text() for path in sources]
    for part in range(2):
        rows = (json.dumps({"text": text}) for text in texts[part::2])
        (tmp_path / f"part{part}.jsonl").write_text("\n".join(rows))
    tokenizer = tokenizer_of(texts, tmp_path / "bpe.json")

    data = [f"--data.path={tmp_path}/part*.jsonl", f"--data.tokenizer={tokenizer}", "--data.context_length=64"]
    data += ["--data.document_mask=True", "--data.validation_windows=16"]
    assert main(["tokenise", "text", *data]) == 0
    assert "tokens" in capsys.readouterr().out

    sizes = ["--model.d_model=32", "--model.n_layers=2", "--model.n_heads=2", "--model.d_ff=64"]
    lazy = ["--model.attention.normaliser=Elastic", "--model.attention.bias=LearnedBias"]
    recipe = [
        "--train.steps=120",
        "--train.lr=1e-2",
        "--train.warmup_steps=5",
        "--train.batch_size=8",
        "--train.val_every=30",
    ]
    train = ["train", "text", *data, *sizes, *lazy, *recipe, "--devices", "2", "--keep-checkpoint"]
    assert main([*train, "--runs", str(runs)]) == 0
    (result,) = runs.rglob("result.json")
    measured = json.loads(result.read_text())
    assert measured["metrics"]["loss/val"] < measured["metrics"]["init/loss/val"] - 1
    assert measured["execution"]["devices"] == 2

    checkpoint = str(result.with_name("final.ckpt"))
    out = tmp_path / "benchmarks.json"
    assert main(["lm-eval", checkpoint, "--task-folder", str(task_folder), "--out", str(out)]) == 0
    assert len(json.loads(out.read_text())["tasks"]) == 9
    assert main(["diagnose", checkpoint, "--lengths", "128,256", "--sequences", "2", "--out", str(tmp_path / "d")]) == 0
    capsys.readouterr()
    assert main(["generate", checkpoint, "--prompt", "import ", "--tokens", "8", "--temperature", "0"]) == 0
    said = capsys.readouterr().out.rstrip("\n")
    assert main(["export", checkpoint, str(tmp_path / "exported")]) == 0
    loaded = subprocess.run(
        [sys.executable, "-c", LOADS, str(tmp_path / "exported")], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.rstrip("\n") == said
