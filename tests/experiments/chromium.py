"""A headless Chromium, driven through a pair of pipes: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-pipe"
).split()


class Browser:
    """One page; what it logs, throws and asks the network for is kept."""

    def __init__(self, send: Any, receive: Any) -> None:
        self.send, self.receive, self.count, self.session = send, receive, 0, None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def message(self) -> dict[str, Any]:
        content = bytearray()
        while (byte := self.receive.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("Chromium ended")
            content += byte
        return json.loads(content)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.count += 1
        about = {"sessionId": self.session} if self.session else {}
        self.send.write(json.dumps({"id": self.count, "method": method, "params": params, **about}).encode() + b"\0")
        self.send.flush()
        while (answer := self.message()).get("id") != self.count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, path: Path, width: int, height: int, *, mobile: bool = False) -> None:
        """Show a file, and wait until all plots are drawn."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        self.call("Page.navigate", url=path.as_uri())
        self.evaluate(DRAWN)

    def errors(self) -> list[str]:
        """Return what was logged as an error or a warning, and what was thrown."""
        said = []
        for event in self.events:
            about = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                said.append(str(about["exceptionDetails"]))
            if event.get("method") == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                said.append(about["entry"]["text"])
            if event.get("method") == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                said.append(str([a.get("value", a.get("description")) for a in about["args"]]))
        return said

    def requests(self) -> list[str]:
        """Return what was asked for of any network."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("file:", "data:", "blob:"))]

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def print(self, path: Path) -> Path:
        printed = self.call(
            "Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True
        )
        path.write_bytes(base64.b64decode(printed["data"]))
        return path


DRAWN = """new Promise((done, fail) => {
  const start = Date.now();
  const look = () => {
    const plots = [...document.querySelectorAll("script[data-plot]")].map((s) => s.closest("figure"));
    const all = document.readyState === "complete" && plots.every((p) => p.dataset.drawn);
    if (all) setTimeout(() => done(plots.length), 300);
    else if (Date.now() - start > 60000) fail(new Error("plots were not drawn within a minute"));
    else setTimeout(look, 50);
  };
  look();
})"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a Chromium, and end it."""
    if PROGRAM is None:
        raise RuntimeError("there is no Chromium")
    (commands, send), (receive, answers) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = f'exec "$@" 3<&{commands} 4>&{answers} >/dev/null 2>&1'  # it reads from 3 and writes to 4
        program = subprocess.Popen(
            ["bash", "-c", line, "bash", PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(commands, answers),
        )
        os.close(commands)
        os.close(answers)
        with os.fdopen(send, "wb") as to, os.fdopen(receive, "rb") as back:
            try:
                browser = Browser(to, back)
                yield browser
                browser.session = None
                browser.call("Browser.close")
            finally:
                try:
                    program.wait(10)
                except subprocess.TimeoutExpired:
                    program.kill()
                    program.wait()
