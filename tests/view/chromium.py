"""A headless Chromium that tests talk to over its debugging pipe; nothing but the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ANSWER_S = 60.0


def find_browser() -> str | None:
    """The browser of $G2SIM_CHROMIUM, or the first one on the path."""
    given = os.environ.get("G2SIM_CHROMIUM")
    return given or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. ``complaints`` holds what it wrote on its console, errors it threw, and what it asked the network for.

    Args:
        scratch: an empty folder for the browser's profile.
    """

    def __init__(self, browser: str, scratch: Path, *, width: int = 1400, height: int = 1000) -> None:
        self.complaints: list[str] = []
        self.requested: list[str] = []
        self._answers: dict[int, Any] = {}
        self._next = 0
        self._buffer = b""
        told, self._write = os.pipe()
        self._read, answers = os.pipe()

        def give_pipes() -> None:  # the browser reads descriptor 3 and writes descriptor 4
            low, high = os.dup(told), os.dup(answers)
            os.dup2(low, 3)
            os.dup2(high, 4)

        self._process = subprocess.Popen(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                "--hide-scrollbars",
                f"--user-data-dir={scratch}",
                f"--window-size={width},{height}",
            ],
            pass_fds=(3, 4),
            preexec_fn=give_pipes,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(told)
        os.close(answers)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(timeout=ANSWER_S)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)

    def call(self, method: str, **params: Any) -> Any:
        """The result of one command of the debugging protocol."""
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _receive(self, deadline: float) -> None:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._read, 1 << 20) if ready else b""
            assert chunk, "the browser does not answer"
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(text)
        if "id" in message:
            self._answers[message["id"]] = message
            return
        method, params = message["method"], message.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.complaints.append(f"console.{params['type']}: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded":
            self.complaints.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def dark(self, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def open(self, file: Path, fragment: str = "") -> None:
        """Opens a file and waits until the page says that it is ready."""
        self.call("Page.navigate", url="about:blank")  # so that a fragment alone loads the page again
        self.call("Page.navigate", url=file.resolve().as_uri() + fragment)
        self.wait("document.body && (document.body.dataset.ready === 'yes')")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + ANSWER_S
        while not self.run(condition):
            assert time.monotonic() < deadline, f"never: {condition}; {self.complaints}"
            time.sleep(0.02)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are waited for."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        value = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        assert isinstance(value, str)
        return value

    def frame(self) -> None:
        """Waits until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        self.mouse("mouseReleased", x, y, button="left", clickCount=1)

    def screenshot(self, file: Path, *, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))
