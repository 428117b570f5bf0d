"""A page in headless Chromium without network: what its scripts found, and what the console complained of."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

# Sent by the page to the frame around it. A window narrower than 500 pixels exists only inside a frame.
REPORT = """<script>addEventListener("load", () => setTimeout(() => {
    const found = (() => { %s })();
    parent.postMessage(JSON.stringify(found), "*");
}, %d));</script>"""
FRAME = """<!doctype html><meta charset=utf-8><body style="margin: 0">
<iframe src="%s" style="width: %dpx; height: 1000px; border: 0"></iframe>
<script>addEventListener("message", (event) => { document.title = encodeURIComponent(event.data); });</script>"""


def probe(page: Path, script: str, profile: Path, *, width: int = 1400, wait: int = 0) -> tuple[object, list[str]]:
    """(what the function body `script` returns `wait` ms after the page has loaded, errors on the console)."""
    probed, frame = (page.with_name(f"{page.stem}-{width}-{role}.html") for role in ("probe", "frame"))
    probed.write_text(page.read_text() + REPORT % (script, wait))
    frame.write_text(FRAME % (probed.name, width))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom",
        "--no-first-run", "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}", "--window-size=1500,1000", "--virtual-time-budget=20000",
        "--enable-logging=stderr", frame.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    errors = [line for line in said if "pydata-sphinx-theme.js" not in line and "[PST]" not in line]  # the theme chats
    answer = re.search(r"<title>([^<]*)</title>", done.stdout)
    assert answer, f"the page's script did not run: {errors}"
    return json.loads(unquote(answer[1])), errors
