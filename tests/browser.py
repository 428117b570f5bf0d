"""Pages in headless Chromium: what a script found in them without network, and what the console complained of."""

import atexit
import functools
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 120.0  # seconds
# Chromium reads commands from its file 3 and writes answers to its file 4. It ends when they are closed.
PIPES = 'exec "$@" 3<&0 4>&1 </dev/null >/dev/null'
ON_THE_CONSOLE = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
LOADED = 'new Promise((done) => document.readyState === "complete" ? done() : addEventListener("load", done))'


class Browser:
    """One page of Chromium, for all files in turn: to start a browser takes longer than to show a file.

    A call sends a method of the debugging protocol. `events` is what happened since it was cleared.
    """

    def __init__(self, profile: Path | str, *options: str) -> None:
        command = [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--no-first-run", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
            "--remote-debugging-pipe", *options,
        ]  # fmt: skip
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(["sh", "-c", PIPES, "sh", *command], **pipes)
        self._messages, self._numbers, self._session = self._read(), itertools.count(1), {}
        self.events: list[dict] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        while (answer := next(self._messages)).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> Iterator[dict]:
        """Yield each message, which ends with a byte of 0."""
        file, left = self._process.stdout.fileno(), b""
        while True:
            assert select.select([file], [], [], PATIENCE)[0], f"the browser has said nothing for {PATIENCE:g} s"
            got = os.read(file, 1 << 16)
            assert got, f"the browser ended with {self._process.wait()}"
            *whole, left = (left + got).split(b"\0")
            yield from map(json.loads, whole)

    def wait(self, event: str) -> None:
        """Wait until this has happened since `events` was cleared."""
        while event not in [each.get("method") for each in self.events]:
            self.events.append(next(self._messages))

    def run(self, script: str) -> object:
        """Return the value of an expression, or what its promise resolves to."""
        answer = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(10)


@functools.cache
def _browser() -> Browser:
    """The browser of this process."""
    profile = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, profile, ignore_errors=True)
    browser = Browser(profile, "--host-resolver-rules=MAP * ~NOTFOUND")
    atexit.register(browser.close)
    return browser


def probe(page: Path, script: str, *, width: int = 1400, wait: int = 0) -> tuple[object, list[str]]:
    """(what the function body `script` returns `wait` ms after the page has loaded, errors on the console).

    These ms are of a clock that runs as fast as the page's scripts.
    """
    browser = _browser()
    browser.events.clear()
    browser("Emulation.setVirtualTimePolicy", policy="advance")
    browser("Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=False)
    browser("Page.navigate", url=page.as_uri())
    browser.run(LOADED)
    if wait:
        browser("Emulation.setVirtualTimePolicy", policy="pauseIfNetworkFetchesPending", budget=wait)
        browser.wait("Emulation.virtualTimeBudgetExpired")
    found = browser.run(f"(() => {{ {script} }})()")
    browser("Emulation.setVirtualTimePolicy", policy="pause")  # a clock without end would keep a core busy
    said = [json.dumps(each["params"]) for each in browser.events if each.get("method") in ON_THE_CONSOLE]
    return found, [line for line in said if "pydata-sphinx-theme.js" not in line and "[PST]" not in line]
