"""Peak resident memory of one forward and backward pass, by backend and length (B = 1, H = 4, D = 64, float32).

    python kernels/bench/memory.py [--lengths 1024 4096 16384] [--backends chunked reference] [--json PATH]

Every figure comes from a fresh process: the rise of the peak (VmHWM) over what was resident when q, k, v and the
output's gradient already existed, so the output and the gradients count. Linux only. A run of `reference` that would
not fit into the free memory is shown as "-".
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HEADS, WIDTH = 4, 64
REFERENCE_MATRICES = 10  # what `reference` holds at its peak, in matrices [H, L, L] (measured at L = 4096)


def measure(backend: str, length: int) -> int:
    """Bytes by which forward + backward raise the peak of this process."""
    import torch

    from flash_lazy import lazy_attention

    torch.set_num_threads(1)

    def step(length: int) -> int:
        q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3))
        tau, bias = torch.ones(HEADS, requires_grad=True), torch.zeros(HEADS, 512, requires_grad=True)
        grad = torch.randn(1, HEADS, length, WIDTH)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        lazy_attention(q, k, v, tau, bias, backend=backend).backward(grad)
        return _status("VmHWM") - before

    step(64)  # loads the libraries' own buffers
    return step(length)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def fits(backend: str, length: int) -> bool:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return backend != "reference" or REFERENCE_MATRICES * 4 * HEADS * length**2 < free


def made_with() -> dict[str, str]:
    """How and where the figures were made."""
    import torch

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "command": "python kernels/bench/memory.py " + " ".join(sys.argv[1:]),
        "commit": commit.stdout.strip() or "unknown",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()} with {os.cpu_count()} CPU cores, 1 thread",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--backends", nargs="+", default=["chunked", "reference"])
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args.backends[0], args.lengths[0]))
        return

    rows = []
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    for backend in args.backends:
        for length in args.lengths:
            rise = None
            if fits(backend, length):
                command = [sys.executable, __file__, "--one", "--backends", backend, "--lengths", str(length)]
                env = {**os.environ, "PYTHONPATH": path}
                rise = int(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
            rows.append({"backend": backend, "length": length, "rise_bytes": rise})

    print("| L | " + " | ".join(f"{backend} (MiB)" for backend in args.backends) + " |")
    print("|---:" * (len(args.backends) + 1) + "|")
    for length in args.lengths:
        found = [row["rise_bytes"] for row in rows if row["length"] == length]
        print(f"| {length} | " + " | ".join("-" if x is None else f"{x / 2**20:.0f}" for x in found) + " |")
    if args.json:
        args.json.write_text(json.dumps(made_with() | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
