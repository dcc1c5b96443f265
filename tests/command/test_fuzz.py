"""Any command line ends with status 0, 1, 2 or 130, in time; a mistake is one line, no traceback, and creates nothing.

Commands, options, override paths and hostile values are mixed at random. What would train, measure, serve or go on the
network is replaced by something that records that the command line was accepted, and the machine is one of 256 MB.
"""

import contextlib
import io
import os
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mistakes import PASSWORD, iter_commands, snapshot_tree
from two_rows import two_rows
from untrained import save

from lit_lazy.attention import Bias, Gate, Normaliser, Position
from lit_lazy.command.main import main, make_parser
from lit_lazy.config.serialisation import find_leaf_classes, flatten, to_dict
from lit_lazy.config.user_files import experiment
from lit_lazy.data import DataConfig, synthetic_task, text
from lit_lazy.data.pipeline import hub
from lit_lazy.support.error_messages import LONGEST_MESSAGE
from lit_lazy.support.names_to_paths import find

MILLISECONDS = 15_000
URL = f"postgresql://me:{PASSWORD}@127.0.0.1:1/x"
PLAIN = "0 1 2 3 -1 1.5 true None null e.py a.py s.py final.ckpt runs new"
HOSTILE = r"""
nan -inf 1e400 1000000000000 18446744073709551616 1_0 0x10 1:30 2001-01-01 ~ ٣ ünï 😀 !!python/object:os.system '
" \ :smile: [/x] %s%n%d {x!r} $HOME <b> =1+1 -- --= .. / * loop loop/x fifo folder notes.txt broken.py deep.json
/dev/zero /proc/self/mem /proc/new ~nobody/x a?b 100%25 e.py/x none.py sqlite:///new.db sqlite:////dev/zero
http://127.0.0.1:1 ://:geheim@ a,b , 1,1 0,1,2 softmax,lazy
"""
STRANGE = [
    *(URL, *HOSTILE.split(), "9" * 5000, "x" * 300, "x/" * 3000, ",".join(map(str, range(3000)))),
    *("[" * 200_000, "&a [*a]", "{a: b}", "[1, 2]", "a\nb", "\0", "\x1b[31m", "\ud800"),
]
COMMAND_PARSERS = dict(iter_commands(make_parser()))
ACTIONS = [
    (name, action)
    for parser in COMMAND_PARSERS.values()
    for action in parser._actions
    for name in action.option_strings
]
OPTIONS = sorted({name for name, action in ACTIONS if action.nargs != 0})
FLAGS = [*sorted({name for name, action in ACTIONS if action.nargs == 0}), "--version", "-x", "--"]
APART = {"new", "doctor", "completion", "mirror", "runs", "pack", "compare"}
"""Commands that are meant to write, or look at the machine."""
COMMANDS = [[], ["ablate"], ["ablate", "rum"], *(list(words) for words in COMMAND_PARSERS if not APART & {*words})]
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "q_window_2-stdlib_small"
GOOD = [
    (["train", "e.py"], ["--runs", "--threads", "--devices", "--micro-batch", "--init-from", ""]),
    (["ablate", "run", "a.py", "--dry-run"], ["--runs", "--base", "--workers", "--storage", "--rows", "--seeds", ""]),
    (["ablate", "search", "s.py"], ["--runs", "--base", "--workers", "--trials", ""]),
    (["ablate", "verdicts", "answers"], ["--insert"]),
    (["ablate", "table", "a.py", "--from", f"answers/{RESULTS.name}/table.json"], ["--from", "--base"]),
    (["report", "a.py"], ["--runs", "--base", "--out", "--ui-url"]),
    (["dashboard"], ["--runs", "--port"]),
    (["evaluate", "final.ckpt"], ["--threads", "--import", ""]),
    (
        ["diagnose", "final.ckpt", "--window", "9"],
        ["--data", "--lengths", "--layers", "--first", "--out", "--runs", ""],
    ),
    (["generate", "final.ckpt", "--prompt", "1 2"], ["--tokens", "--temperature", "--window", "--prompt-file"]),
    (["import", "model.gguf", "new/model.ckpt"], ["--sha256"]),
    (["lm-eval", "final.ckpt"], ["--tasks", "--task-folder", "--limit", "--out", "--threads"]),
    (["tokenise", "e.py"], ["--processes", ""]),
]
"""Accepted commands, and options of theirs; "" for an override."""
SEARCH = """
from lit_lazy.grid.search.definition import Real, Search
search = Search("s", {"train.lr": Real(1e-4, 1e-2, log=True)}, "e.py")
"""


WORK = [
    *("tracking.tracked_training.Tracker", "grid.run.run_grid", "grid.search.run.run_search"),
    *("report.diagnose_checkpoint.measure_all", "tracking.serve.subprocess.Popen", "measure.lm_eval.load_tasks"),
    *("command.tokenise_train_generate.print_generation", "support.disk.create_folder_atomically"),
    "report.question_verdicts.format_summary",
]
"""What is replaced."""


class AcceptedError(BaseException):
    """A command line was accepted: what it asks for would begin now."""


def accept(*_args: object, **_options: object) -> None:
    raise AcceptedError


def values() -> st.SearchStrategy[str]:
    parts = [name for part in (Normaliser, Bias, Gate, Position, DataConfig) for name in find_leaf_classes(part)]
    drawn = st.integers(1, 64), st.floats(0.001, 0.9), st.integers(), st.floats()
    texts = *map(st.sampled_from, (["", *PLAIN.split()], STRANGE, parts)), st.text(max_size=20)
    return st.one_of(*(number.map(str) for number in drawn), *texts)


def fields() -> st.SearchStrategy[str]:
    known = [*flatten(to_dict(experiment("backcopy_tiny"))), "model.attention.normaliser.tau_init"]
    known += [f"data.{name}" for name in ("path", "tokenizer", "validation", "hub", "column", "max_tokens", "stream")]
    return st.one_of(st.sampled_from(known), st.text(max_size=12), st.sampled_from(STRANGE))


def option(name: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    """An option and its value, as one word or two; an override where the name is empty."""
    named = st.tuples(name.flatmap(lambda known: st.just(known) if known else fields().map("--{}".format)), values())
    return st.one_of(named.map(list), named.map(lambda pair: ["=".join(pair)]))


def command_lines() -> st.SearchStrategy[list[str]]:
    """Half of them commands that would be accepted, and one to three options of theirs; half anything."""
    near = st.sampled_from(GOOD).flatmap(
        lambda good: st.lists(option(st.sampled_from(good[1])), max_size=3).map(lambda more: sum(more, good[0]))
    )
    begin = st.tuples(st.sampled_from([*COMMANDS, *(words for words, _ in GOOD)]), st.lists(values(), max_size=2))
    some = st.one_of(option(st.sampled_from([*OPTIONS, ""])), st.sampled_from(FLAGS).map(lambda flag: [flag]))
    anything = st.tuples(begin, st.lists(some, max_size=3)).map(
        lambda drawn: sum(drawn[1], [*drawn[0][0], *drawn[0][1]])
    )
    return st.one_of(near, anything)


@pytest.fixture
def stage(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files to name, and no way to do real work."""
    save(place / "final.ckpt", experiment("backcopy_tiny"))
    shutil.copy(find("experiments", "backcopy_tiny"), place / "e.py")
    (place / "a.py").write_text(two_rows("a").replace('"backcopy_tiny"', '"e.py"'))
    (place / "s.py").write_text(SEARCH)
    (place / "broken.py").write_text("def config(): return config()\n")
    (place / "notes.txt").write_text("some words\n\n" * 2000)
    (place / "deep.json").write_text("[" * 200_000)
    (place / "folder").mkdir()
    shutil.copytree(RESULTS, place / "answers" / RESULTS.name)
    (place / "runs").mkdir()
    os.mkfifo(place / "fifo")
    (place / "loop").symlink_to("loop")
    for where in WORK:
        monkeypatch.setattr(f"lit_lazy.{where}", accept)
    monkeypatch.setattr("lit_lazy.support.machine.measure_total_memory", lambda: 2**28)
    monkeypatch.setattr(hub, "is_hub_reachable", lambda: False)
    monkeypatch.setattr("lit_lazy.training.cost_estimate.estimate_training_seconds", lambda *_: 1.0)
    monkeypatch.setenv("LIT_LAZY_CACHE", str(place.parent / "cache"))
    return place


def check(argv: list[str], stage: Path) -> str:
    """Give a command line to `main`; how it ended."""
    before, printed = snapshot_tree(stage), io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
            status: Any = main(argv)
    except SystemExit as stopped:
        status = stopped.code or 0
    except AcceptedError:
        status = None
    finally:
        torch.set_num_threads(1)
        for cached in (synthetic_task._build_source, text._build_source):
            cached.cache_clear()
    err = printed.getvalue()
    assert status in (None, 0, 1, 2, 130), status
    assert "Traceback" not in err
    assert PASSWORD not in err
    if status in (1, 2):
        assert re.fullmatch(r"lit-lazy[^\n]*: [^\n]+\n", err), err
        assert err[:-1].isprintable()
        assert len(err) < LONGEST_MESSAGE + 200
    assert snapshot_tree(stage) == before
    return "accepted" if status is None else f"status {status}"


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_any_command_line(examples: int, stage: Path) -> None:
    ends = Counter[str]()
    drawn = settings(max_examples=examples, derandomize=examples == 60, database=None, deadline=MILLISECONDS)

    @settings(drawn, suppress_health_check=list(HealthCheck))
    @given(argv=command_lines())
    def run(argv: list[str]) -> None:
        ends[check(argv, stage)] += 1

    run()
    assert ends.total() >= examples
    assert ends.keys() >= {"accepted", "status 2", *(["status 0"] if examples > 60 else [])}
