"""`lit-lazy doctor`, `lit-lazy new` and `lit-lazy fields`"""

import argparse
import importlib.util
import keyword
import os
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from shutil import which

from lit_lazy.command.options import command
from lit_lazy.support.names_to_paths import require_usable_name

USES = {
    "postgres": "Optuna's study on PostgreSQL (--storage)",
    "ray": "grids on a Ray cluster (--launcher ray)",
    "lm-eval": "standard benchmarks (lm-eval)",
    "fla": "RetNet, Mamba2 and Gated DeltaNet",
    "export": "models for transformers (import, export)",
    "tensorboard": "--logger tensorboard",
    "wandb": "--logger wandb",
}
"""Extra of pyproject.toml -> its use."""
TOOLS = {
    "cc": "--compile, tests of crash points",
    "chromium": "tests of pages and dashboards",
    "strace": "tests of network traffic",
    "git": "the commit in results",
}
"""Program -> its use."""
SMOLLM2 = Path("models", "smollm2.ckpt")


@command("doctor", "print versions, devices and backends, and report what is missing", "--runs")
def doctor(options: argparse.Namespace, _rest: list[str]) -> int:
    """Exit status 1 if a required dependency is missing or tracking is unusable."""
    from flash_lazy.cpu.library import find_obstacle
    from lit_lazy.support.secrets import redact_url
    from lit_lazy.tracking.check_databases import check_store
    from lit_lazy.tracking.store_address import default_uri

    wrong, missing = [], []
    print("\n".join(list_versions()))
    for name, text, extra in find_unmet_requirements():
        if extra is None:
            wrong.append(f"{name}: {text}; pip install -r requirements.txt")
        else:
            missing.append(f"{USES.get(extra, extra)}: {name} {text}; pip install 'lit-lazy[{extra}]'")
    print("\n".join(["", *list_devices(), *list_backends()]))
    uri = default_uri(options.runs)
    try:
        check_store(uri)
        print(f"{'tracking':12} {redact_url(uri)}")
    except ValueError as error:
        wrong.append(str(error))
    if SMOLLM2.exists():
        print(f"{'SmolLM2-135M':12} {SMOLLM2}, {SMOLLM2.stat().st_size / 1e6:.0f} MB")
    else:
        missing.append(f"adapting a real language model: no {SMOLLM2}; make smollm2")
    if obstacle := find_obstacle():
        missing.append(f"faster attention on CPUs: {obstacle}")
    missing += [f"{use}: the program {name} is not on the PATH" for name, use in TOOLS.items() if not which(name)]
    for title, found in (("errors", wrong), ("missing for optional features", missing)):
        if found:
            print("\n".join(["", f"{title}:", *(f"  {line}" for line in found)]))
    if not wrong:
        print("\nEverything required is installed.")
    return 1 if wrong else 0


def list_versions() -> Iterator[str]:
    """Versions of this project, Python and the packages that affect results."""
    import platform

    from lit_lazy import __version__
    from lit_lazy.support.provenance import find_version, git_sha

    yield f"{'lit-lazy':12} {__version__} at commit {git_sha()}"
    yield f"{'python':12} {platform.python_version()} on {platform.system()} {platform.machine()}"
    for name in ("torch", "triton", "lightning", "mlflow", "optuna", "datasets"):
        yield f"{name:12} {find_version(name)}"


def find_unmet_requirements() -> Iterator[tuple[str, str, str | None]]:
    """Package, problem and extra (None: required) of each requirement that is missing or has a wrong version."""
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    from lit_lazy.support.provenance import MISSING, find_version

    for requirement in map(Requirement, requires("lit-lazy") or ()):
        extra = next((name for name in USES if f'extra == "{name}"' in str(requirement.marker)), None)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra or ""}):
            continue  # for another system
        installed = find_version(requirement.name)
        if installed == MISSING or not requirement.specifier.contains(installed, prereleases=True):
            yield requirement.name, f"is {installed} (needed: {requirement.specifier})", extra


def list_devices() -> Iterator[str]:
    """CPU, memory and GPUs."""
    import torch

    from lit_lazy.support.machine import count_cores, measure_total_memory

    yield f"{'CPU':12} {count_cores()} cores, {measure_total_memory() / 1e9:.1f} GB of memory, swap and GPU memory"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for i in range(count):
        facts = torch.cuda.get_device_properties(i)
        yield f"{f'GPU {i}':12} {facts.name}, {facts.total_memory / 1e9:.1f} GB"
    if not count:
        yield f"{'GPU':12} none visible to torch"


def list_backends() -> Iterator[str]:
    """The attention backend that `auto` selects on this machine."""
    from lit_lazy.attention import Attention, AttentionSpec, Elastic, LearnedBias
    from lit_lazy.config import ModelConfig
    from lit_lazy.training.execution_settings import describe_backend, select_training_device

    shape = ModelConfig().layer_shape(0, context_length=128)
    for name, spec in (("softmax", AttentionSpec()), ("lazy", AttentionSpec(Elastic(), LearnedBias()))):
        backend = Attention(spec, shape, "auto").to(select_training_device()).backend_name()
        yield f"{name:12} attention runs on {describe_backend(backend)}"


@command(
    "fields",
    "list an experiment's fields that can be overridden",
    "experiment",
    {"--all": "also those of the classes that it does not use"},
)
def fields(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.config.overrides import list_fields
    from lit_lazy.config.user_files import experiment

    print("\n".join(list_fields(experiment(options.experiment), options.all)))
    if not options.all:
        print("\n--all lists the fields of all other classes too.")
    return 0


COMMANDS = {
    "ablation": ("ablate", "run"),
    "question": ("ablate", "run"),
    "normaliser": ("train",),
    "bias": ("train",),
    "data": ("train",),
    "metric": ("train",),
}
"""The command that runs a file, by its kind. `templates/` has a file of each kind."""


def identifier(text: str) -> str:
    """Option type: a name that Python code can define."""
    if keyword.iskeyword(text) or not text.isidentifier():
        need = "letters, digits and _, no digit first, and no keyword"
        raise ValueError(f"{text!r}: must be a Python identifier: {need}; for example my_variant")
    return text


@command(
    "new",
    "write a commented file, which runs as it is: an ablation, a question, a rule, a bias, data or a metric",
    {
        "kind KIND": (", ".join(COMMANDS), {"choices": [*COMMANDS]}),
        "identifier NAME": ("its name, a Python identifier", {"type": identifier}),
        "--out FILE.py": "file to write (default: NAME.py)",
    },
)
def new(options: argparse.Namespace, _rest: list[str]) -> int:
    from lit_lazy.support.console import get_program_name
    from lit_lazy.support.disk import check_writable_folder, write_text

    file = options.out or Path(f"{options.identifier}.py")
    option = "--out" if options.out else "NAME"
    named = f"{option} {str(file)!r}"
    if file.suffix != ".py" or not file.stem:
        raise ValueError(f"{named}: must end in .py")
    if os.path.lexists(file):
        raise ValueError(f"{named}: exists already; give another name, or another file by --out")
    require_usable_name(file)
    if (place := _find_installed(file.stem)) is not None:  # files that import that module would be refused
        raise ValueError(f"{named}: {file.stem} is the name of a Python module ({place}); give another")
    check_writable_folder(option, file.parent)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, fill_template(options.kind, options.identifier))
    print(f"{file}: written; its comments say what to change")
    print(f"run it:  {shlex.join([get_program_name(), *COMMANDS[options.kind], str(file)])}")
    return 0


def fill_template(kind: str, name: str) -> str:
    """The text of a kind's file, with the name in place of its own and, for its classes, `My` and the name."""
    text = Path(__file__).with_name("templates").joinpath(f"{kind}.py").read_text(encoding="utf-8")
    # No class of this project begins with My, so a file called elastic.py does not define a second Elastic.
    of_class = "My" + "".join(part[:1].upper() + part[1:] for part in name.removeprefix("my_").split("_"))
    return text.replace(f"my_{kind}", name).replace(f"My{kind.capitalize()}", of_class)


def _find_installed(name: str) -> str | None:
    """Where Python finds a module of this name among its own and installed ones; None if there is none."""
    if name in sys.stdlib_module_names:
        return "the standard library"
    found = importlib.util.find_spec(name) if name.isidentifier() else None
    origin = None if found is None else found.origin
    installed = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    return origin if origin and any(Path(origin).is_relative_to(folder) for folder in installed) else None
