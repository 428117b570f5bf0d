"""JupyterLab with a folder of the repository, in a headless Chromium that Python drives over its debugging protocol."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from browser import Browser
from my_lessons import SETTINGS

STARTING = 90.0  # seconds


class Lab:
    """One page of JupyterLab. `run` evaluates JavaScript in it; the page's `jupyterapp` is JupyterLab itself."""

    def __init__(self, address: str, browser: Browser) -> None:
        self.address, self.run, self._send = address, browser.run, browser

    def show(self, path: str) -> None:
        """Open a file of the served folder, alone. JupyterLab is loaded for the first one: that takes seconds."""
        self._send("Emulation.setFocusEmulationEnabled", enabled=True)  # JupyterLab's current widget has the focus
        if self.run("Boolean(window.jupyterapp)"):
            self.run(OPEN_ALONE % json.dumps(path))
        else:
            self._send("Page.navigate", url=f"{self.address}/lab/tree/{path}?reset")

    def open(self, path: str) -> None:
        """Open a notebook of the served folder, and wait until its cells are there."""
        self.show(path)
        self.wait("window.jupyterapp?.shell.currentWidget?.content?.widgets?.length > 3")
        self.wait("jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'")

    def wait(self, condition: str, seconds: float = STARTING) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"after {seconds:g} s not yet: {condition}"
            time.sleep(0.2)

    def run_cell(self, start: str) -> str:
        """Run the cell that begins so. Return the text of its outputs."""
        return self.run(RUN_CELL % json.dumps(start))

    def screenshot(self, path: Path) -> None:
        """Write what the window shows to a PNG file."""
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot")["data"]))


# As the address of a file does. What was not saved is not asked for.
OPEN_ALONE = """(async () => {
    for (const { context } of jupyterapp.shell.widgets("main")) if (context) context.model.dirty = false;
    await jupyterapp.commands.execute("application:close-all");
    await jupyterapp.commands.execute("filebrowser:open-path", { path: %s });
})()"""
RUN_CELL = """(async () => {
    const panel = jupyterapp.shell.currentWidget, notebook = panel.content;
    const index = notebook.widgets.findIndex((cell) => cell.model.sharedModel.source.startsWith(%s));
    if (index < 0) return "no such cell";
    notebook.activeCellIndex = index;
    notebook.deselectAll();
    await jupyterapp.commands.execute("notebook:run-cell");
    return notebook.widgets[index].model.outputs.toJSON().map(({ text, data, ename, evalue }) =>
        text ?? data?.["text/markdown"] ?? data?.["text/plain"] ?? `${ename}: ${evalue}`
    ).join("\\n");
})()"""


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _answers(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=5):
        return True
    return False


def _until_it_answers(process: subprocess.Popen, address: str) -> None:
    end = time.monotonic() + STARTING
    while not _answers(address):
        assert process.poll() is None, f"{process.args[0]} ended with {process.returncode}"
        assert time.monotonic() < end, f"no answer from {address}"
        time.sleep(0.2)


@contextlib.contextmanager
def lab(root: Path, scratch: Path) -> Iterator[Lab]:
    """Serve `root` in JupyterLab, and yield its page. Settings, trust and the browser's profile are in `scratch`."""
    port = _free_port()
    folders = {f"JUPYTER_{kind}_DIR": str(scratch / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    folders["JUPYTER_CONFIG_PATH"] = str(SETTINGS)
    server = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--expose-app-in-browser", "--allow-root"]
    server += [f"--ServerApp.port={port}", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}"]
    address, quiet = f"http://127.0.0.1:{port}", {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(server, env=os.environ | folders, cwd=root, **quiet))
        stack.callback(process.terminate)
        _until_it_answers(process, f"{address}/api")
        browser = Browser(scratch / "profile", "--window-size=1400,1000")
        stack.callback(browser.close)
        yield Lab(address, browser)
