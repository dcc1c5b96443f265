"""Peak resident memory of a forward and backward pass by backend and length (B = 1, H = 4, D = 64, float32).

    python3 -m bench.memory [--lengths 1024 4096 16384] [--backends chunked reference] [--json PATH]

Every figure comes from a fresh process: the rise of the peak (VmHWM) over the resident memory after allocating q, k, v
and the output's gradient, so it includes the output and the gradients. Linux only. "-" marks a run of `reference` that
would not fit into the free memory.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from bench.provenance import collect_provenance
from flash_lazy import Backend, lazy_attention

HEADS, WIDTH = 4, 64
REFERENCE_MATRICES = 10  # peak of `reference` in matrices [H, L, L], measured at L = 4096


def measure(backend: Backend, length: int) -> int:
    """Rise of this process's peak memory during forward + backward, in bytes."""
    torch.set_num_threads(1)

    def step(length: int) -> int:
        q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
        tau, bias = torch.ones(HEADS, requires_grad=True), torch.zeros(HEADS, 512, requires_grad=True)
        grad = torch.randn(1, HEADS, length, WIDTH)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
        before = _read_status("VmRSS")
        lazy_attention(q, k, v, tau, bias, backend=backend).backward(grad)
        return _read_status("VmHWM") - before

    step(64)  # warm-up: allocates the libraries' buffers
    return step(length)


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def fits(backend: str, length: int) -> bool:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return backend != "reference" or REFERENCE_MATRICES * 4 * HEADS * length**2 < free


def measure_alone(backend: str, length: int) -> int:
    """Run `measure` in a separate process."""
    command = [sys.executable, "-m", "bench.memory", "--one", "--backends", backend, "--lengths", str(length)]
    kernels = Path(__file__).parents[1]  # contains `bench` and `flash_lazy`
    return int(subprocess.run(command, cwd=kernels, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m bench.memory", description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--backends", nargs="+", default=["chunked", "reference"])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args.backends[0], args.lengths[0]))
        return

    rows = []
    for backend in args.backends:
        for length in args.lengths:
            rise = measure_alone(backend, length) if fits(backend, length) else None
            rows.append({"backend": backend, "length": length, "rise_bytes": rise})

    print("| L | " + " | ".join(f"{backend} (MiB)" for backend in args.backends) + " |")
    print("|---:" * (len(args.backends) + 1) + "|")
    for length in args.lengths:
        found = [row["rise_bytes"] for row in rows if row["length"] == length]
        print(f"| {length} | " + " | ".join("-" if x is None else f"{x / 2**20:.0f}" for x in found) + " |")
    if args.json:
        result = collect_provenance("bench.memory") | {"threads": 1, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
