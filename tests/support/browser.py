"""Chromium driven through its debugging pipe: real clicks and keys, windows of any size, console and requests."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 120.0  # seconds until a browser that does not answer counts as broken
ARROWS = {"ArrowLeft": ("", 37), "ArrowUp": ("", 38), "ArrowRight": ("", 39), "ArrowDown": ("", 40)}
KEYS = {"Enter": ("\r", 13), "Tab": ("", 9), " ": (" ", 32), **ARROWS}


class BrowserTab:
    """One page in a browser.

    Attributes:
        complaints: errors and warnings of the console, uncaught exceptions and refused policies.
        requests: addresses that were asked for.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._count, self._unread, self._session = 0, b"", ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: object) -> dict[str, Any]:
        """A command of the Chrome DevTools protocol and its result.

        Raises:
            RuntimeError: the browser refused it.
        """
        self._count += 1
        message: dict[str, object] = {"id": self._count, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            self._unread += os.read(self._from, 2**20)
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        self._heard(message.get("method"), message.get("params", {}))
        return message

    def _heard(self, event: str | None, said: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(said["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(said["args"]))
        elif event == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])

    def open(self, page: Path, width: int = 1280, height: int = 900) -> None:
        """Open a page in a window of that size, and wait until its first charts are drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.body && document.body.dataset.charts === 'drawn'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise.

        Raises:
            RuntimeError: it threw.
        """
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description"))
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true.

        Raises:
            TimeoutError: it does not become so.
        """
        self._wait(lambda: bool(self.evaluate(f"Boolean({expression})")), expression)

    def until_asked_for(self, ending: str) -> None:
        """Wait until the last request was for an address with this ending, whether it succeeds or not.

        Raises:
            TimeoutError: no such request comes.
        """
        self._wait(lambda: self.requests[-1].endswith(ending), ending)

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > end:
                raise TimeoutError(f"the page never came to {what}: {self.complaints}")
            self.evaluate("new Promise((done) => setTimeout(done, 50))")

    def show(self, selector: str) -> tuple[float, float]:
        """Scroll to an element; the middle of it in the window."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
        found = self.evaluate(box)
        return found["x"] + found["width"] / 2, found["y"] + found["height"] / 2

    def click(self, selector: str) -> None:
        """Click an element with the mouse."""
        x, y = self.show(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse to an element."""
        x, y = self.show(selector)
        for shift in (30, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)

    def press(self, key: str) -> None:
        """Press a key, which the focused element receives."""
        text, code = KEYS[key]
        about = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def printed(self, file: Path) -> None:
        """The page as PDF."""
        file.write_bytes(base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"]))


@contextmanager
def browser_tab(program: str, profile: Path) -> Iterator[BrowserTab]:
    """Start a browser with one page, which ends with the `with` block."""
    to_browser, from_browser = os.pipe(), os.pipe()
    settings = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
    quiet = ("--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}")
    command = [program, *settings, *quiet, "--remote-debugging-pipe"]
    read, write = to_browser[0], from_browser[1]
    place = f'exec 3<&{read} 4>&{write}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", place, "bash", *command],
        pass_fds=(read, write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read)
    os.close(write)
    try:
        yield BrowserTab(to_browser[1], from_browser[0])
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
