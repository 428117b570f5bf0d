"""A page in headless Chromium without network: what its scripts found, and what the console complained of."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def probe(page: Path, script: str, profile: Path, *, width: int = 1400) -> tuple[object, list[str]]:
    """(what the function body `script` returns once the page has loaded, errors on the console)."""
    report = """<script>
        const found = (() => { %s })();
        const text = document.createElement("pre");
        text.id = "probe";
        text.textContent = encodeURIComponent(JSON.stringify(found));
        document.body.append(text);
    </script>"""
    probed = page.with_name(f"{page.stem}-probe.html")
    probed.write_text(page.read_text() + report % script)
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom",
        "--no-first-run", "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={profile}", f"--window-size={width},1000", "--virtual-time-budget=5000",
        "--enable-logging=stderr", probed.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    errors = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    answer = re.search(r'<pre id="probe">([^<]*)</pre>', done.stdout)
    assert answer, f"the page's script did not run: {errors}"
    return json.loads(unquote(answer[1])), errors
