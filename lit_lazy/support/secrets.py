"""Removal of passwords in URLs from messages, logs and the process list."""

import logging
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

PASSWORD = re.compile(r"(:/{1,2}[^\s:/@'\"]*:)(?!PASSWORD@)(?:(?!://)[^'\"])*@|(password=)[^\s&'\"]*", re.IGNORECASE)
"""In a URL, also one that was normalised like a path."""
ARGUMENTS = slice(45, 47)
"""Fields of /proc/self/stat after the process name: where its arguments start and end in memory."""


def redact_url(url: str) -> str:
    """A URL without its password; from a malformed URL, removes whatever looks like one."""
    without = re.sub(r"(?<=:)(?!//).*@", "***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", without)


def redact_text(text: str) -> str:
    """A text without the passwords in its URLs. Leaves the placeholder `USER:PASSWORD@` of messages unchanged."""
    return PASSWORD.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)


class RedactingFormatter(logging.Formatter):
    """Removes passwords from log records, including tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


def strip_user(url: str) -> str:
    """A server's address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def format_command_line(program: str = "lit-lazy") -> str:
    """The command as a user would type it, without passwords."""
    words = [redact_url(word) if "://" in word else word for word in sys.argv[1:]]
    return f"{program} {shlex.join(words)}".rstrip()


def hide_passwords() -> None:
    """Overwrite the passwords in this process's arguments, as curl and mysql do; only on Linux.

    They are visible until then; an environment variable is not.
    """
    statistics = Path("/proc/self/stat")
    if not statistics.exists() or not any("://" in word and word != redact_url(word) for word in sys.argv):
        return
    start, end = map(int, statistics.read_text(encoding="utf-8").rpartition(")")[2].split()[ARGUMENTS])
    try:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            shown = memory.read(end - start)
            memory.seek(start)
            memory.write(b"\0".join(_blank_password(word) if b"://" in word else word for word in shown.split(b"\0")))
    except OSError as error:  # a sandbox may forbid it
        print(f"the process list shows the password on the command line ({error.strerror})", file=sys.stderr)


def _blank_password(word: bytes) -> bytes:
    """A URL with a star for each character of its password."""
    secret = rb"(?<=:)(?!//).*(?=@)|(?<=password=)[^&]*"
    return re.sub(secret, lambda found: b"*" * len(found[0]), word, flags=re.DOTALL)
