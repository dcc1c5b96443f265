"""Others' tokenisers are loaded and tried in a process with limits: a small file can ask for any memory and time.

The process runs this file by its name, and imports nothing else of this project.
"""

import os
import resource
import subprocess
import sys
from functools import lru_cache

MOST_BYTES, MOST_SECONDS = 2 * 2**30, 30
"""Address space and CPU time of the process."""
PROBE = " ".join(chr(code) * 50 + "! " + chr(code) * 2 for code in range(32, 127)) + " é\n日本 🙂"
"""Runs of each character, on which a pattern that tries all ways to split them does not end."""


@lru_cache
def try_tokenizer(content: bytes) -> None:
    """Try a file of the tokenizers library, once in this process, on a short text.

    Raises a one-line ValueError if that exceeds the limits or crashes; what the library refuses is left to it.
    """
    alone = os.environ | {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", __file__], input=content, capture_output=True, env=alone, check=False)
    if done.returncode:
        limits = f"{MOST_BYTES >> 30} GiB or {MOST_SECONDS} s of CPU time"
        raise ValueError(f"needs more than {limits} for a short text, or crashes (status {done.returncode})")


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(sys.stdin.buffer.read())
        tokenizer.decode(tokenizer.encode(PROBE).ids, skip_special_tokens=False)
    except MemoryError:
        raise
    except Exception:  # which a panic is not
        return


if __name__ == "__main__":
    main()
