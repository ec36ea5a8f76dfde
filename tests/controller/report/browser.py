"""A headless Chromium, driven over its DevTools protocol. https://chromedevtools.github.io/devtools-protocol/"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER_PATH = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
BROWSER_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-dev-shm-usage", "--mute-audio", "--hide-scrollbars",
    "--remote-debugging-port=0",
)  # fmt: skip
TIMEOUT_SECONDS = 120.0
"""Seconds until a browser that does not answer is given up; no test depends on it."""
KEY_EVENTS = {"Tab": ("Tab", 9, ""), "Space": (" ", 32, " "), "Enter": ("Enter", 13, "\r"), "Home": ("Home", 36, ""),
        "ArrowLeft": ("ArrowLeft", 37, ""), "ArrowDown": ("ArrowDown", 40, "")}  # fmt: skip


class BrowserTab:
    """One page. `requests` are the URLs that it asked for, `said` what stood on its console, errors included."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.requests: list[str] = []
        self.said: list[str] = []
        self._loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=TIMEOUT_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self._on_event(answer)

    def _on_event(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.said.append(str([one.get("value") for one in about["args"]]))
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(about["exceptionDetails"]))
            case "Log.entryAdded":
                self.said.append(about["entry"]["text"])
            case "Page.loadEventFired":
                self._loaded = True

    def open(self, file: Path, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Load a file, as a screen of that size shows it."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.send("Page.navigate", url=file.as_uri())
        while not self._loaded:
            self._on_event(json.loads(self._socket.recv(timeout=TIMEOUT_SECONDS)))
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        name, code, text = KEY_EVENTS[key]
        what = {"key": name, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.send("Input.dispatchKeyEvent", type="keyDown", **what, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **what)

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        file.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser() -> Iterator[BrowserTab]:
    """A browser with one empty tab, closed at the end."""
    assert BROWSER_PATH is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        argv = [BROWSER_PATH, *BROWSER_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_tab_address(process, Path(folder)), max_size=None, proxy=None) as socket:
                yield BrowserTab(socket)
        finally:
            process.kill()
            process.wait()


def _tab_address(process: subprocess.Popen[bytes], folder: Path) -> str:
    """The address of its tab, once it has written down its port."""
    file, until = folder / "DevToolsActivePort", time.monotonic() + TIMEOUT_SECONDS
    while not (file.is_file() and len(file.read_text().splitlines()) > 1):
        assert process.poll() is None, "the browser has ended"
        assert time.monotonic() < until, "the browser does not start"
        time.sleep(0.05)
    with urllib.request.urlopen(
        f"http://127.0.0.1:{file.read_text().splitlines()[0]}/json", timeout=TIMEOUT_SECONDS
    ) as answer:
        return next(tab["webSocketDebuggerUrl"] for tab in json.load(answer) if tab["type"] == "page")
