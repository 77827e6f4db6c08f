"""Pages in a real browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")


def shown(page: str, folder: Path, script: str) -> Any:
    """Run `script` in a real browser after the page, and return what it gives to `report`."""
    probe = (
        "<script>const report = value => { const out = document.createElement('output');"
        "out.textContent = encodeURIComponent(JSON.stringify(value)); document.body.append(out); };"
        f"try {{ {script} }} catch (error) {{ report(String(error)); }}</script></body>"
    )
    assert BROWSER is not None and page.count("</body>") == 1
    (folder / "page.html").write_text(page.replace("</body>", probe), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,800",
         f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", "--dump-dom",
         (folder / "page.html").as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = re.search(r"<output>(.*?)</output>", done.stdout)
    assert found, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(unquote(found[1]))
