"""Drives a headless Chromium over its debugging pipe with the standard library alone."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_browser() -> str | None:
    """CHROMIUM or CHROME of the environment, or a browser on the PATH."""
    for name in (os.environ.get("CHROMIUM"), os.environ.get("CHROME"), *NAMES):
        if name and (found := shutil.which(name)):
            return found
    return None


class Browser:
    """One browser process; NUL-ended JSON goes in through its file descriptor 3 and comes out of 4."""

    def __init__(self, executable: str, profile: Path) -> None:
        command_read, self._write = os.pipe()
        self._read, answer_write = os.pipe()
        # The browser wants its ends as 3 and 4; a shell puts them there, whatever numbers the pipes have.
        line = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
        options = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-component-update", "--disable-background-networking", "--mute-audio",
            "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", line, executable, *options],
            pass_fds=(command_read, answer_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(command_read)
        os.close(answer_write)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, timeout: float = 30, **parameters: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; what comes in between is kept in `events`."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = self._receive(end - time.monotonic())
            if found is None:
                continue
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                return found.get("result", {})
            self.events.append(found)
        raise TimeoutError(f"{method} had no answer in {timeout} s")

    def wait(self, seconds: float) -> None:
        """Takes in events for a while."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if found := self._receive(left):
                self.events.append(found)

    def _receive(self, timeout: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], max(0.0, timeout))[0]:
                return None
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser has ended, exit code {self._process.poll()}")
            self._buffer += part
        first, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(first)

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False, touch: bool = False) -> Tab:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, target, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height, touch)
        tab.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ])  # fmt: skip
        tab.go(url)
        return tab

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.call("Browser.close", timeout=5)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)


class Tab:
    """One page: scripts, clicks, keys, pictures, and what it said and asked for."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if self.run("document.readyState") == "complete" and self.run("location.href") != "about:blank":
                return
            self.browser.wait(0.02)
        raise TimeoutError(f"{url} did not load")

    def resize(self, width: int, height: int, touch: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; an exception in it is one here."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails'].get('exception', {}).get('description')}")
        return found["result"].get("value")

    def box(self, selector: str) -> dict[str, float]:
        """Scrolls the element into view and returns where it is in the window."""
        return self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            f"e.scrollIntoView({{block: 'center'}}); "
            "const r = e.getBoundingClientRect(); return {x: r.x, y: r.y, width: r.width, height: r.height}; })()"
        )

    def point(self, selector: str, right: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        box = self.box(selector)
        return box["x"] + right * box["width"], box["y"] + down * box["height"]

    def mouse(self, kind: str, x: float, y: float, button: str = "none", clicks: int = 0) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks)

    def hover(self, selector: str, right: float = 0.5, down: float = 0.5) -> None:
        self.mouse("mouseMoved", *self.point(selector, right, down))

    def click(self, selector: str) -> None:
        x, y = self.point(selector)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, "left", 1)
        self.mouse("mouseReleased", x, y, "left", 1)

    def tap(self, selector: str, right: float = 0.5, down: float = 0.5) -> None:
        x, y = self.point(selector, right, down)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str) -> None:
        codes = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27, "Enter": 13}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=codes[name])

    def choose(self, selector: str, value: str) -> None:
        """Sets a select as a person would: the value, then the event."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            "e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )

    def picture(self, path: Path, whole: bool = False) -> Path:
        more: dict[str, Any] = {}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            height = min(size["height"], 16000)
            clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
            more = {"captureBeyondViewport": True, "clip": clip}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"]))
        return path

    def complaints(self) -> list[str]:
        """Console errors and warnings, exceptions, and blocked content so far."""
        found = []
        for event in self._mine():
            given = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"].get("exception", {}).get("description")))
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(f"{given['type']}: {[a.get('value') for a in given['args']]}")
            elif event["method"] == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                found.append(given["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        return [e["params"]["request"]["url"] for e in self._mine() if e["method"] == "Network.requestWillBeSent"]

    def _mine(self) -> list[dict[str, Any]]:
        return [event for event in self.browser.events if event.get("sessionId") == self.session]
