"""Passwords within URLs: nowhere shown, neither in messages nor in the list of processes."""

import logging
import re
import shlex
import sys
from pathlib import Path
from urllib.parse import urlsplit

PASSWORD = re.compile(r"(:/{1,2}[^\s:/@'\"]*:)(?!PASSWORD@)(?:(?!://)[^'\"])*@|(password=)[^\s&'\"]*", re.IGNORECASE)
"""In a URL, or in what a path makes of one."""
ARGUMENTS = slice(45, 47)
"""Of the fields of /proc/self/stat behind the process's name: where in memory its arguments begin and end."""


def redact_url(url: str) -> str:
    """A URL without its password, also one that is no proper URL: then what looks like a password is left out."""
    without = re.sub(r"(?<=:)(?!//).*@", "***@", url)
    return re.sub(r"(?<=password=)[^&]*", "***", without)


def redact_text(text: str) -> str:
    """A text without the passwords of the URLs in it; `USER:PASSWORD@` is how messages say what one looks like."""
    return PASSWORD.sub(lambda found: f"{found[1]}***@" if found[1] else f"{found[2]}***", text)


class RedactingFormatter(logging.Formatter):
    """Formats what is logged, tracebacks included, without passwords."""

    def format(self, record: logging.LogRecord) -> str:
        return redact_text(super().format(record))


def strip_user(url: str) -> str:
    """A server's address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def format_command_line() -> str:
    """The command as a user would type it, without passwords."""
    words = [redact_url(word) if "://" in word else word for word in sys.argv[1:]]
    return shlex.join(["lit-lazy", *words])


def hide_passwords() -> None:
    """Overwrite the passwords in what the list of processes shows of this one, where it is Linux's.

    As curl and mysql do: whoever looks in the first moment still sees them, which a variable spares.
    """
    statistics = Path("/proc/self/stat")
    if not statistics.exists() or not any("://" in word and word != redact_url(word) for word in sys.argv):
        return
    start, end = map(int, statistics.read_text().rpartition(")")[2].split()[ARGUMENTS])
    try:
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            shown = memory.read(end - start)
            memory.seek(start)
            memory.write(b"\0".join(_blank_password(word) if b"://" in word else word for word in shown.split(b"\0")))
    except OSError as error:  # a sandbox may forbid it
        print(f"the list of processes shows the password that was typed ({error.strerror})", file=sys.stderr)


def _blank_password(word: bytes) -> bytes:
    """A URL with stars for its password, of the same length."""
    secret = rb"(?<=:)(?!//).*(?=@)|(?<=password=)[^&]*"
    return re.sub(secret, lambda found: b"*" * len(found[0]), word, flags=re.DOTALL)
