"""Cost of the Triton kernels without a GPU: a model of matrix products and bytes, and a report of the compiled code.

A kernel is compiled with the arguments that its launcher passes in an example call, specialised as at run time, so the
code is that of a real launch. The example has the benchmark's sizes: B 4, H 16, L 4096, 512 biases per head.
"""

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from flash_lazy.call import Call
from flash_lazy.fused import backward, configurations, decode, forward, hopper
from flash_lazy.fused.configurations import Blocks
from flash_lazy.fused.launch import make_meta

KERNELS: dict[str, ModuleType] = {
    "forward": forward,
    "query_gradient": backward,
    "key_gradient": backward,
    "bias_gradient": backward,
    "decode_scores": decode,
    "decode_values": decode,
    "decode_sum": decode,
}
"""Module of each kernel, where its name has the suffix `_kernel`."""
HOPPER_KERNELS: dict[str, Any] = {"forward": hopper.forward, "query_gradient": hopper.query_gradient}
"""Module of each kernel in Gluon."""
DECODING = ("decode_scores", "decode_values", "decode_sum")
"""Kernels with fixed blocks; the others choose theirs from configurations.CONFIGURATIONS."""
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes of shared memory per program by compute capability of the data-centre cards (A100, H100, B200)."""
CONSUMER_LIMIT = 99 * 1024
"""The same for consumer cards of these generations."""
RESIDENT = 2 * 132
"""Resident programs in the example, those of an H100 or H200."""
BATCH, HEADS, LENGTH, REACH, WINDOW = 4, 16, 4096, 512, 1024
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PRODUCTS = {
    "forward": {"softmax": (2, 0), "lazy": (1, 2), "authors": (3, 0)},
    "forward+backward": {"softmax": (7, 0), "lazy": (5, 6), "authors": (12, 0)},
}
"""Matrix products per tile: in every tile, and additionally in a tile with a surviving weight. Lazy: forward 1 + 2f,
query_gradient 2 + 2f, key_gradient 2 + 2f; softmax: FlashAttention-2; the authors' kernel: counted in its code."""
IN_LOOPS = {"forward": (1, 1, 2, 2), "query_gradient": (4, 4), "key_gradient": (4, 4)}
"""Products per tile with a surviving weight in each product loop, PLAIN and NEAR in turn; one exponential per score."""
PROCESSORS, GIGAHERTZ = 132, 1.755
MULTIPLICATIONS, EXPONENTIALS, ISSUED = 2048, 16, 4
"""Rates per cycle of an H100 or H200 processor: bfloat16 multiplications, exp2, and warp instructions."""
PRODUCT_LATENCY, SYNC = 1.8, 110
"""Time of one program's products over that at the full rate, and cycles of a wait or barrier."""
REGISTERS = 65536
"""Registers of a processor."""
MOVED = {"forward": (4, 2), "query_gradient": (5, 7), "key_gradient": (6, 4), "bias_gradient": (4, 4)}
"""Minimum traffic of a kernel in T and R of the cost model: each input read once, each result written once."""
BUFFERS = {
    "softmax": "2 R, kept for the backward pass",
    "maxima": "4 P M ceil(L / N), to skip empty tiles",
    "alive_tiles": "4 P ceil(L / N), to skip empty tiles",
    "strip": "4 H (W + 512)",
    "by_row": "4 R",
    "survivors": "R",
    "partial": "16 H N d ceil(4 P / (H d)), d = ceil((ceil(W / N) + 1) / 2), for dbias",
}
"""Buffers allocated in addition to inputs, outputs and gradients, by kernel parameter."""
_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_INSTRUCTIONS = {"mma.sync": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05.mma": "tcgen05.mma"}
_PRODUCT = re.compile(r"\b(HMMA|HGMMA|UTC\w*MMA)\b")
_MIN_MULTIPLICATIONS = 64
"""Multiplications from which a loop counts as a float32 matrix product, which has no instruction of its own."""


class Variant(NamedTuple):
    """Options of a call that affect the compiled code."""

    bias: bool = True
    slopes: bool = False
    window: bool = False
    packed: bool = False
    renormalise: bool = False
    stats: bool = False
    merged: bool = False


class Loop(NamedTuple):
    """Counts per thread and iteration of an innermost loop with a matrix product; one iteration is one tile."""

    instructions: int
    barriers: int
    waits: int
    """Waits for wgmma products."""
    spills: int
    """Spill loads and stores."""


class CompiledKernel(NamedTuple):
    """Resources and instructions of a compiled kernel."""

    shared: int
    """Bytes of shared memory per program."""
    registers: int
    """Registers per thread."""
    spilled: int
    """Bytes that ptxas spills in the complete kernel."""
    loops: tuple[dict[str, int], ...]
    """Fields of each `Loop` in code order; within a pass, PLAIN tiles before NEAR ones."""
    instructions: tuple[str, ...]
    """Tensor-core instructions: mma.sync, wgmma, tcgen05.mma; none for float32, which has no such instruction."""
    serialised: bool
    """Whether ptxas reports that it serialises wgmma products (its note C7515)."""


def compile_kernel(
    name: str,
    blocks: Blocks | None,
    target: int,
    dtype: str = "bf16",
    width: int = 64,
    variant: Variant = Variant(),  # noqa: B008 - immutable
) -> CompiledKernel:
    """Compile one of KERNELS for a compute capability (80, 90, 100) and analyse the result.

    blocks: None for the kernels of DECODING. Raises RuntimeError in a process with TRITON_INTERPRET=1, where nothing
    can be compiled, and any error of triton.
    """
    if configurations.INTERPRETED:
        raise RuntimeError("compiling needs a process without TRITON_INTERPRET=1, where kernels are interpreted")
    kernel = _get_kernel(name)
    arguments = collect_launch_arguments(name, DTYPES[dtype], width, variant)
    warps, stages = arguments.pop("num_warps"), arguments.pop("num_stages")
    if blocks is not None:
        arguments |= make_meta(kernel, blocks)
        warps, stages = blocks.warps, blocks.stages
    source = ASTSource(kernel, *_specialise(kernel, arguments))
    return _analyse(source, GPUTarget("cuda", target, 32), {"num_warps": warps, "num_stages": stages})


def _analyse(source: Any, target: GPUTarget, options: dict[str, Any]) -> CompiledKernel:
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = folder, True
        with contextlib.redirect_stdout(log):  # triton prints the output of `ptxas -v`
            binary = triton.compile(source, target=target, options=options)
    return CompiledKernel(
        shared=binary.metadata.shared,
        registers=_parse_number(r"Used (\d+) registers", log.getvalue()),
        spilled=_parse_number(r"(\d+) bytes spill stores", log.getvalue()),
        loops=tuple(loop._asdict() for loop in product_loops(_disassemble(binary.asm["cubin"]))),
        instructions=tuple(name for name, text in _INSTRUCTIONS.items() if text in binary.asm["ptx"]),
        serialised="wgmma.mma_async instructions are serialized" in log.getvalue(),
    )


def compile_hopper_kernel(name: str, width: int, packed: bool = False) -> CompiledKernel:
    """One of HOPPER_KERNELS for a head width, in bfloat16 with a bias, compiled for sm_90 and analysed.

    packed: with documents. Its loops are those of both groups of warps. Raises as `compile_kernel` does.
    """
    module = HOPPER_KERNELS[name]
    attribute = f"hopper_{name}_kernel"
    recorder = _GluonRecorder()
    q = torch.empty(1 if packed else 2, 2, 256, width, dtype=torch.bfloat16)
    cuts = torch.empty(4, dtype=torch.int32) if packed else None
    call = Call(q, q, q, torch.empty(2), bias=torch.empty(2, 64), cu_seqlens=cuts)
    by_row = torch.empty(4, *q.shape[:3])
    with patch.object(module, attribute, recorder), patch.object(module, "count_processors", lambda _: 2):
        if name == "forward":
            module.compute_output(call, torch.empty_like(q), by_row[:2])
        else:
            module.compute_query_gradient(call, q, by_row[:2], torch.empty_like(q), by_row, by_row[0])
    kernel = getattr(module, attribute)
    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialisation, options = binder(*recorder.arguments, **recorder.options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, recorder.options, bound, specialisation, options
    )
    return _analyse(GluonASTSource(kernel, signature, constants, attributes), target, options.__dict__)


class _GluonRecorder:
    """Replaces the kernel and records the arguments of its launch."""

    def __getitem__(self, grid: Any) -> Any:
        return self._record

    def _record(self, *arguments: Any, **options: Any) -> None:
        self.arguments, self.options = arguments, options


def _get_kernel(name: str) -> Any:
    return getattr(KERNELS[name], f"{name}_kernel")


class _Recorder:
    """Replaces a kernel and records the arguments of its launch."""

    def __init__(self, kernel: Any) -> None:
        self.__name__ = kernel.__name__
        self.arg_names = kernel.arg_names
        self.arguments: dict[str, Any] = {}

    def __getitem__(self, grid: Any) -> Any:
        return self.arguments.update


def collect_launch_arguments(
    name: str,
    dtype: torch.dtype,
    width: int,
    variant: Variant = Variant(),  # noqa: B008 - immutable
) -> dict[str, Any]:
    """Launch arguments of one of KERNELS in the example call, by parameter, with `num_warps` and `num_stages`.

    Tensors are on the meta device, without memory.
    """
    if name in DECODING and (variant.packed or variant.stats):
        raise ValueError(f"variant is {variant}: {name} has neither packed nor stats; choose another kernel")
    batch, length = (1, BATCH * LENGTH) if variant.packed else (BATCH, LENGTH)
    rows = 1 if name in DECODING else length

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    q, k, v = (empty(batch, HEADS, size, width, dtype=dtype) for size in (rows, length, length))
    call = Call(
        *(q, k, v, empty(HEADS)),
        bias=empty(HEADS, REACH) if variant.bias else None,
        slopes=empty(HEADS) if variant.slopes else None,
        cu_seqlens=empty(9, dtype=torch.int32) if variant.packed else None,
        renormalise=variant.renormalise,
        window=WINDOW if variant.window else None,
    )
    recorders = {each: _Recorder(_get_kernel(each)) for each in KERNELS}
    with contextlib.ExitStack() as stack:
        settings = {"AUTOTUNE": False, "INTERPRETED_RESIDENT": RESIDENT, "MERGED_BACKWARD": variant.merged}
        stack.enter_context(patch.multiple(configurations, **settings))
        for each, module in KERNELS.items():
            stack.enter_context(patch.object(module, f"{each}_kernel", recorders[each]))
        if name in DECODING:
            decode.decode(call)
        else:
            out, softmax, mass, *_ = forward.forward(call, training=True, stats=variant.stats)
            saved_out = out if variant.renormalise else None
            dlse = softmax[0] if variant.stats else None
            backward.backward(call, saved_out, out, dlse, softmax, mass, variant.bias, variant.slopes)
    return recorders[name].arguments


def _specialise(
    kernel: Any, arguments: dict[str, Any]
) -> tuple[dict[str, str], dict[tuple[int], Any], dict[tuple[int], list[list[Any]]]]:
    """Signature, constants and attributes as at run time: 1 and None become constants, multiples of 16 are marked."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        free = parameter.do_not_specialize
        one = isinstance(value, int) and value == 1 and not free
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[parameter.name] = _POINTERS[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not free):
            attributes[index,] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _parse_number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"ptxas printed nothing that matches {pattern!r}: {text.strip()[:200]!r}")
    return int(found[1])


def _disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def product_loops(listing: str) -> list[Loop]:
    """Innermost loops with a matrix product in a listing of `cuobjdump -sass`.

    A loop is the span of a backward branch; it excludes rarely executed code that the compiler moved out of it.
    """
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", listing, re.MULTILINE)
    code = [(int(address, 16), text) for address, text in lines]

    def body(span: tuple[int, int]) -> list[str]:
        return [text for address, text in code if span[0] <= address <= span[1]]

    def multiplies(texts: list[str]) -> bool:
        return any(map(_PRODUCT.search, texts)) or sum("FFMA" in text for text in texts) >= _MIN_MULTIPLICATIONS

    branches = [(re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text), address) for address, text in code]
    spans = {(int(found[1], 16), address) for found, address in branches if found and int(found[1], 16) < address}
    loops = sorted(span for span in spans if multiplies(body(span)))
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    counted = (r"", r"\bBAR\.", r"\bWARPGROUP\.(?:DEPBAR|ARRIVE)", r"\b(?:LDL|STL)\b")
    return [
        Loop(*(sum(bool(re.search(pattern, text)) for text in body(span)) for pattern in counted)) for span in inner
    ]


def report(
    widths: Sequence[int],
    every: bool = False,
    dtypes: Sequence[str] = ("bf16", "fp32"),
    variant: Variant = Variant(),  # noqa: B008 - immutable
    kernels: Iterable[str] = KERNELS,
    targets: Iterable[int] = SHARED_LIMITS,
) -> list[dict[str, Any]]:
    """One row per kernel, type, width, target and configuration: the default, or with `every` all of them.

    A row holds the fields of `CompiledKernel`, or "failed" with the reason. Compiles in one process per core.
    """
    jobs = [
        (name, blocks, target, dtype, width, variant)
        for name in kernels
        for dtype in dtypes
        for width in widths
        for blocks in _list_choices(name, dtype, width, variant)[: None if every else 1]
        for target in targets
    ]
    workers = min(os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(workers, get_context("spawn"), _silence) as pool:
        return list(pool.map(_compile_row, jobs))


def _list_choices(name: str, dtype: str, width: int, variant: Variant) -> Sequence[Blocks | None]:
    if name in DECODING:
        return [None]
    if variant.merged and name == "key_gradient":
        name = "merged_gradient"
    return configurations.list_choices(name, torch.empty(1, 1, 1, width, dtype=DTYPES[dtype]))


def _silence() -> None:
    """Drop the pages of intermediate code that triton prints on failure; the row holds the reason."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _compile_row(job: tuple[str, Blocks | None, int, str, int, Variant]) -> dict[str, Any]:
    name, blocks, target, dtype, width, _ = job
    row = {"kernel": name, "dtype": dtype, "width": width, "target": target, "blocks": blocks and blocks._asdict()}
    try:
        return row | compile_kernel(*job)._asdict()
    except Exception as error:  # a configuration that triton cannot compile is a finding
        return row | {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}


def count_loop_spills(row: dict[str, Any]) -> int:
    """Spill loads and stores in the product loops of a row."""
    return sum(loop["spills"] for loop in row["loops"])


def format_table(rows: Iterable[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = ["kernel", "type", "D", "target", "blocks M x N, warps, stages", "shared (KiB)", "limit (KiB)"]
    head += ["fits 99 KiB", "registers", "spilled (bytes)", "spills in product loops", "instruction"]
    head += ["product loops: instructions (barriers)"]
    lines = ["| " + " | ".join(head) + " |", "|:---|:---|---:|:---|:---|" + "---:|" * 6 + ":---|:---|"]
    for row in rows:
        blocks = row["blocks"]
        at = f"{blocks['m']} x {blocks['n']}, {blocks['warps']}, {blocks['stages']}" if blocks else "its own"
        cells = [row["kernel"], row["dtype"], str(row["width"]), f"sm_{row['target']}", at]
        if "failed" in row:
            cells += ["failed", *[""] * 5, row["failed"].replace("|", "/"), ""]
        else:
            limit = SHARED_LIMITS[row["target"]]
            cells += [f"{row['shared'] / 1024:.1f}" + (" (over)" if row["shared"] > limit else ""), str(limit // 1024)]
            cells += ["yes" if row["shared"] <= CONSUMER_LIMIT else "no", str(row["registers"]), str(row["spilled"])]
            instructions = ", ".join(row["instructions"]) or "none"
            cells += [str(count_loop_spills(row)), instructions + (" (serialised)" if row["serialised"] else "")]
            cells += [", ".join(f"{loop['instructions']} ({loop['barriers']})" for loop in row["loops"])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def count_products(operation: str, kind: str, alive: float) -> float:
    """Average matrix products per tile if a share `alive` of the tiles has a surviving weight."""
    fixed, more = PRODUCTS[operation][kind]
    return fixed + more * alive


def format_cost_model() -> str:
    """Products, bytes and buffers of the kernels as Markdown."""
    kinds = {"softmax": "softmax", "lazy": "flash_lazy", "authors": "the authors' kernel"}
    shares = (1.0, 0.7, 0.4, 0.1, 0.0)
    lines = ["## Matrix products of a tile", "", "f is the share of tiles in which a weight survives.", ""]
    lines += ["| | | in f |" + "".join(f" f = {share:g} |" for share in shares)]
    lines += ["|:---|:---|:---|" + "---:|" * len(shares)]
    for operation, counts in PRODUCTS.items():
        for kind, (fixed, more) in counts.items():
            values = "".join(f" {count_products(operation, kind, share):.3g} |" for share in shares)
            formula = f"{fixed} + {more} f" if more else str(fixed)
            lines.append(f"| {operation} | {kinds[kind]} | {formula} |{values}")
    shape = f"B {BATCH}, H {HEADS}, L {LENGTH}, W {REACH}"
    head = ["| |", "formula |", *(f"D {width} (MiB) |" for width in (64, 128))]
    lines += ["", f"## Bytes in bfloat16 at {shape}", ""]
    lines += ["T = 2 B H L D (one of q, k, v and the output), R = 4 B H L (a number per row). Each tensor counts once:"]
    lines += [
        "tiles that are read again come from the cache where they fit.",
        "",
        " ".join(head),
        "|:---|:---|---:|---:|",
    ]
    for name, (tensors, rows) in MOVED.items():
        sizes = [count_moved_bytes(name, width) for width in (64, 128)]
        lines.append(f"| {name} reads and writes | {tensors} T + {rows} R |" + _format_mebibytes(sizes))
    buffers = [count_buffer_bytes(width) for width in (64, 128)]
    for name, formula in BUFFERS.items():
        lines.append(f"| {name} | {formula} |" + _format_mebibytes([sizes[name] for sizes in buffers]))
    lines += ["", f"P = {RESIDENT} programs at a time, as on an H100 or H200; M, N: the blocks that need most."]
    lines += [
        "Softmax attention keeps out and lse for the backward pass, T + R; these kernels a row's maximum and sum, 2 R.",
        "",
    ]
    return "\n".join(lines)


def format_schedule(rows: Iterable[dict[str, Any]]) -> str:
    """`estimate_milliseconds` of the rows as Markdown."""
    parts = ("products", "exponentials", "issue", "waits", "all")
    lines = [
        f"## Milliseconds on {PROCESSORS} processors at {GIGAHERTZ} GHz, by these counts",
        "",
        f"B {BATCH}, H {HEADS}, L {LENGTH}, W {REACH}, bfloat16, no tile empty, work shared out evenly. Each",
        f"part alone, at the processor's rates, with {SYNC} cycles for a wait or barrier. All: what one program takes",
        f"by itself, with {PRODUCT_LATENCY} times its products, divided by the programs on a processor; but no less",
        "than a part. The two numbers are fitted to passes.md: its W 512 within 11 %, but dk/dv at D 128, which",
        "spills, 20 % too low.",
        "",
        f"| kernel | D | blocks M x N, warps | of them on a processor | {' | '.join(parts)} |",
        "|:---|---:|:---|" + "---:|" * 6,
    ]
    for row in rows:
        if found := estimate_milliseconds(row):
            blocks, figures = row["blocks"], "".join(f" {found[part]:.2f} |" for part in parts)
            at = f"{blocks['m']} x {blocks['n']}, {blocks['warps']}"
            lines.append(f"| {row['kernel']} | {row['width']} | {at} | {found['resident']} |{figures}")
    return "\n".join(lines) + "\n"


def estimate_milliseconds(row: dict[str, Any]) -> dict[str, float] | None:
    """Time of a row's kernel in the example call, its parts, and the programs on a processor.

    None for other targets and types than sm_90 and bfloat16, and for kernels whose loops are not known.
    """
    known = 0 < len(IN_LOOPS.get(row["kernel"], ())) <= len(row.get("loops", ()))
    if not known or (row["target"], row["dtype"]) != (90, "bf16"):
        return None
    by_registers = REGISTERS // (row["registers"] * 32 * row["blocks"]["warps"])
    resident = min(by_registers, SHARED_LIMITS[90] // row["shared"])
    parts = {name: 1e3 * cycles / PROCESSORS / (1e9 * GIGAHERTZ) for name, cycles in _count_cycles(row).items()}
    slower = max(parts["exponentials"], parts["issue"])
    alone = PRODUCT_LATENCY * parts["products"] + slower + parts["waits"]
    return {**parts, "resident": resident, "all": max(parts["products"], slower, alone / resident)}


def _count_cycles(row: dict[str, Any]) -> dict[str, float]:
    """Cycles of one processor for all tiles of the example, by part.

    Loops after those of PLAIN and NEAR tiles are outer ones.
    """
    blocks, found = row["blocks"], dict.fromkeys(("products", "exponentials", "issue", "waits"), 0.0)
    scores = blocks["m"] * blocks["n"]
    counts = count_tiles(row["kernel"], blocks["m"], blocks["n"])
    for index, (loop, factor) in enumerate(zip(row["loops"], IN_LOOPS[row["kernel"]], strict=False)):
        tiles = BATCH * HEADS * counts[index % 2]
        found["products"] += tiles * factor * scores * row["width"] / MULTIPLICATIONS
        found["exponentials"] += tiles * scores / EXPONENTIALS
        found["issue"] += tiles * loop["instructions"] * blocks["warps"] / ISSUED
        found["waits"] += tiles * (loop["barriers"] + loop["waits"]) * SYNC
    return found


def count_tiles(name: str, m: int, n: int) -> tuple[int, int]:
    """PLAIN and NEAR tiles, m rows by n keys, that a kernel visits for one head of the example."""
    plain = near = 0
    if name == "key_gradient":
        for first in range(0, LENGTH, n):
            tiles = -(-(LENGTH - first) // m)
            close = min(-(-(n - 1 + REACH) // m), tiles)
            plain, near = plain + tiles - close, near + close
    else:
        for first in range(0, LENGTH, m):
            far = max(first + 1 - REACH, 0) // n
            plain, near = plain + far, near - (-(first + m) // n) - far
    return plain, near


def count_moved_bytes(name: str, width: int) -> int:
    """Minimum bytes moved by a kernel in the example call, in bfloat16: MOVED evaluated."""
    tensors, rows = MOVED[name]
    return BATCH * HEADS * LENGTH * (2 * tensors * width + 4 * rows)


def count_buffer_bytes(width: int) -> dict[str, int]:
    """Bytes of each buffer of BUFFERS in the example call."""
    arguments: dict[str, Any] = {}
    with patch.object(configurations, "SKIP_EMPTY_TILES", True):
        for kernel in ("query_gradient", "forward", "bias_gradient", "key_gradient"):
            found = collect_launch_arguments(kernel, torch.bfloat16, width)
            arguments |= {name: value for name, value in found.items() if value is not None}
    return {name: arguments[name].numel() * arguments[name].element_size() for name in BUFFERS}


def _format_mebibytes(sizes: Iterable[int]) -> str:
    return "".join(f" {size / 2**20:.2f} |" for size in sizes)
