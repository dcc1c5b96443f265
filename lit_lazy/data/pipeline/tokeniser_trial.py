"""Others' tokenisers are loaded and tried in a process with limits: a small file can ask for any memory and time.

The process runs this file by its name, and imports nothing else of this project.
"""

import json
import os
import resource
import subprocess
import sys
from functools import lru_cache
from typing import Any

MOST_BYTES, MOST_SECONDS = 2 * 2**30, 30
"""Address space and CPU time of the process."""
MOST_STRINGS = 10**4
"""Strings of the file's rules, and characters of each, on which it is tried too."""
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


def find_rule_text(content: Any) -> str:
    """The strings in the rules of a tokeniser's JSON: the text on which a rule acts is among them."""
    found, left = [], [content.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while left and len(found) < MOST_STRINGS:
        item = left.pop()
        if isinstance(item, str):
            found.append(item[:MOST_STRINGS])
        elif isinstance(item, (dict, list)):
            left += item.values() if isinstance(item, dict) else item
    return " ".join(found)


def main() -> None:
    for limited, most in (
        (resource.RLIMIT_AS, MOST_BYTES),
        (resource.RLIMIT_CPU, MOST_SECONDS),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limited)[1]
        resource.setrlimit(limited, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    from tokenizers import Tokenizer

    try:
        content = sys.stdin.buffer.read()
        tokenizer = Tokenizer.from_buffer(content)
        for text in (PROBE, find_rule_text(json.loads(content))):
            tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        tokenizer.decode_batch([[token] for token in tokenizer.get_vocab().values()], skip_special_tokens=False)
    except MemoryError:
        raise
    except Exception:  # which a panic is not
        return


if __name__ == "__main__":
    main()
