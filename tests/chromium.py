"""Headless Chromium, driven over its DevTools pipe: opens pages, waits for content, clicks, takes screenshots."""

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--mute-audio"),
    # Pretend to have a mouse: without one, plotly's tools always cover the charts.
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
)
# Chromium reads commands from descriptor 3 and answers on 4; a message ends with a zero byte.
PIPED = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
POLL_SECONDS = 0.2


class Browser:
    """One page in one browser with a separate profile.

    stored: initial content of the page's local storage.
    """

    def __init__(self, profile: Path, width: int, height: int, stored: Mapping[str, str] | None = None) -> None:
        if CHROMIUM is None:
            raise FileNotFoundError("chromium is missing on the PATH; install it")
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PIPED, str(commands), str(answers), *command],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(commands)
        os.close(answers)
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        """Addresses that the pages requested."""
        self.errors: list[str] = []
        """Errors in the pages' consoles, including exceptions."""
        (page,) = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        source = "".join(f"localStorage.setItem({json.dumps(k)}, {json.dumps(v)});" for k, v in (stored or {}).items())
        self.call("Page.addScriptToEvaluateOnNewDocument", source=f"if (location.host) {{{source}}}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result. Raises RuntimeError if it is rejected."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._answers, 2**20)
            if not read:
                raise RuntimeError("chromium has ended")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def resize(self, width: int, height: int) -> None:
        """Set the page's size in pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        """Load a page, even if its address differs only after the #."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']['exception'].get('description')}")
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = 45.0) -> Any:
        """Poll an expression until its value is true, and return it. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while True:
            with suppress(RuntimeError):  # the page is being replaced
                if value := self.evaluate(expression):
                    return value
            if time.monotonic() > end:
                raise TimeoutError(f"{expression} stayed untrue for {seconds:g} s; the page says: {self.text()[:2000]}")
            time.sleep(POLL_SECONDS)

    def click(self, element: str) -> None:
        """Click the middle of the element that a JavaScript expression finds, once it exists."""
        x, y = self.wait(
            f"(r => r && r.width && [r.x + r.width / 2, r.y + r.height / 2])(({element})?.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def text(self) -> str:
        """The visible text of the page, as one line."""
        return " ".join(self.evaluate("document.body.innerText").split())

    def picture(self, file: Path) -> None:
        """Save a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, _: TracebackType | None) -> None:
        self.close()
