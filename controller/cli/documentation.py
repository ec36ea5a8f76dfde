"""`slipway help --web`: build the documentation site from docs/ and show it in a browser."""

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from controller.config.compose import CONFIG_DIR
from controller.core.errors import ConfigError

SOURCE = CONFIG_DIR.parent
"""Folder of mkdocs.yml."""
PARTS = ("docs", "conf", "controller/cli", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")
"""What the pages are made of."""


class _Handler(SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        return


def page_of(verb: str | None) -> str:
    """Return the address of a verb's page in the site; None: the first page."""
    return f"reference/commands.html#slipway-{verb}" if verb else "index.html"


def build_site(state_dir: Path) -> Path:
    """Build the site unless this version of it exists; return its folder.

    Raises:
        ConfigError: mkdocs is not installed, this Slipway has no docs/, or the build failed.
    """
    if not (SOURCE / "mkdocs.yml").is_file():
        raise ConfigError("the documentation is part of the repository, and this Slipway is installed without it")
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        raise ConfigError("the site is built with MkDocs: run `python -m pip install 'slipway[docs]'`")
    folder = state_dir / "site" / _version()
    if (folder / "index.html").is_file():
        return folder
    print("building the documentation, a few seconds", file=sys.stderr)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=SOURCE, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the documentation could not be built:\n{(done.stdout + done.stderr).strip()}")
    return folder


def show_site(state_dir: Path, verb: str | None, browse: Callable[[str], Any] = webbrowser.open) -> int:
    """Serve the site on loopback and open it in a browser, until Ctrl-C."""
    handler = functools.partial(_Handler, directory=str(build_site(state_dir)))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}/{page_of(verb)}"
        print(f"{address}  (Ctrl-C ends it)", flush=True)
        threading.Thread(target=browse, args=(address,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _version() -> str:
    """Return a hash of the names, sizes and times of the files that the site is made of."""
    found = hashlib.sha256()
    for part in PARTS:
        path = SOURCE / part
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                found.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    return found.hexdigest()[:12]
