"""Drives a headless Chromium over its debugging pipe: loads a page, measures it, takes a picture of it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
Scheme = Literal["light", "dark"]


def find_browser() -> str | None:
    """Return the program of a Chromium that is installed; None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Messages go over two pipes, each ended by a zero byte."""

    def __init__(self, to_browser: Any, from_browser: Any) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        """What the console complained about since the last page was loaded: errors, exceptions, failed requests."""
        self.requests: list[str] = []
        """URLs that the page asked for."""
        self._loaded = False
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")

    def load(self, file: Path, *, width: int, scheme: Scheme, height: int = 900) -> None:
        """Load a file and wait until it is shown."""
        self.problems, self.requests, self._loaded = [], [], False
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._ask("Page.navigate", url=file.as_uri())
        while not self._loaded:
            self._note(self._receive())
        # A round trip later, what the load itself has logged has arrived.
        self.value("document.readyState")

    def value(self, expression: str) -> Any:
        """Return what a JavaScript expression gives on the page."""
        found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page, PNG."""
        shown = self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shown["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._to_browser.write(json.dumps(message).encode() + b"\0")
        self._to_browser.flush()
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._from_browser.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        return json.loads(data)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"]))
        elif method == "Network.loadingFailed":
            self.problems.append(f"a request failed: {params['errorText']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(str(params["args"]))


@contextlib.contextmanager
def opened_browser(program: str, profile: Path) -> Iterator[Page]:
    """Start a browser without a window, give a tab of it, and end it.

    Args:
        program: of the browser.
        profile: an empty folder for its files.
    """
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()

    def as_3_and_4() -> None:
        # The numbers that Chromium reads and writes. Copies first: a pipe may have one of these numbers already.
        commands, answers = os.dup(read_commands), os.dup(write_answers)
        os.dup2(commands, 3)
        os.dup2(answers, 4)

    arguments = [
        *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars"),
        # The sandbox of a browser needs rights that containers and root do not have; the only page is ours.
        *("--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"),
        f"--user-data-dir={profile}",
    ]
    process = subprocess.Popen(
        [program, *arguments],
        pass_fds=(3, 4),
        preexec_fn=as_3_and_4,  # noqa: PLW1509 - two calls to dup2
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(profile)},
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        with os.fdopen(write_commands, "wb") as to_browser, os.fdopen(read_answers, "rb") as from_browser:
            yield Page(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait(timeout=30)
