"""Task files for lm-evaluation-harness: its prompts and metrics on a few local questions."""

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

FOUND = importlib.util.find_spec("lm_eval")
assert FOUND
assert FOUND.origin
SHIPPED = Path(FOUND.origin).parent / "tasks"
FILES = {
    "wikitext": "wikitext/wikitext.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
    "piqa": "piqa/piqa.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "winogrande": "winogrande/default.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "social_iqa": "siqa/siqa.yaml",
    "boolq": "super_glue/boolq/default.yaml",
}
QUESTIONS = {
    "wikitext": [{"page": " = Sinks = \n\n A head @-@ wide sink , of 1 @,@ 000 tokens . " + "It was seen . " * 20}],
    "lambada_openai": [{"text": "the first key is a sink"}, {"text": "weights that are cut are cut"}],
    "piqa": [{"goal": "Cut a weight.", "sol1": "Subtract tau.", "sol2": "Add a very large number.", "label": 0}],
    "hellaswag": [
        {"ctx_a": "A head attends.", "ctx_b": "then it", "activity_label": "Attending", "label": "1",
         "endings": ["stops [title] there", "sees (it)", "is a sink", "ends"]},
    ],
    "winogrande": [{"sentence": "The _ was cut.", "option1": "weight", "option2": "head", "answer": "1"}] * 2,
    "arc_easy": [{"question": "What is cut?", "choices": {"text": ["A", "weights", "C"], "label": ["A", "B", "C"]},
                  "answerKey": "B"}],
    "arc_challenge": [{"question": "Why?", "choices": {"text": ["so", "because", "x"], "label": ["1", "2", "3"]},
                       "answerKey": "3"}],
    "social_iqa": [{"context": "Kay cut a weight.", "question": "Why?", "answerA": "to see", "answerB": "x",
                    "answerC": "no reason", "label": "2"}],
    "boolq": [{"passage": "A sink " * 30, "question": "is it a sink", "label": label} for label in (0, 1, 1)],
}  # fmt: skip


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the Hub and use a separate cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    """The shipped task files, with local data in the same folder."""
    root = tmp_path / "tasks"
    root.mkdir()
    for task, file in FILES.items():
        data = root / f"{task}.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS[task]))
        split = "test" if task in ("wikitext", "lambada_openai", "arc_easy", "arc_challenge") else "validation"
        content = {"include": str(SHIPPED / file), "task": task, "dataset_path": "json", "dataset_name": None}
        content |= {"dataset_kwargs": {"data_files": {split: str(data)}}, "training_split": None}
        content |= {"validation_split": None} if split == "test" else {}
        (root / f"{task}.yaml").write_text(yaml.safe_dump(content))
    return root
