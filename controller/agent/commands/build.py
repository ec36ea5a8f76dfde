"""Assets that a command makes on this worker or VM: in a copy of the code, with the packages of the program."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import file_size, locked, read_json, read_range, remove_tree, safe_join, write_json
from ..process import is_alive, run_tool, send_signal, start_time
from ..secrets import SecretMask, tool_environment
from ..storage import is_folder, object_exists, upload_file, upload_stream, with_retries
from ..tree_hash import file_hash
from .asset import THREADS, FinalError, ProgressReporter
from .code import check_out, install_code
from .venv import install_venv, program_env

if TYPE_CHECKING:
    from ..protocol import InstallCodeRequest, InstallVenvRequest

TAIL_BYTES = 3000
SKIPPED = frozenset({".DS_Store", ".git", "__pycache__"})
"""Not part of an asset, as on the controller's machine."""


def build_asset(
    bucket: str,
    prefix: str,
    argv: list[str],
    code: str,
    venv: str,
    env: dict[str, str] | None = None,
    secrets: dict[str, str] | None = None,
    get_code: InstallCodeRequest | None = None,
    get_venv: InstallVenvRequest | None = None,
) -> None:
    """Run a command that fills a folder, copy its files to the bucket, then write the manifest.

    A command that was killed starts again in an empty folder; one that has ended does not run again. Prints
    {"bytes": so far} at the beginning and while files are copied, and {"done": true} at the end.

    Args:
        bucket: destination bucket.
        prefix: common prefix of the objects.
        argv: command; {output} in its words is the folder to fill.
        code: tree hash of the code in a copy of which it runs.
        venv: fingerprint of the venv in which it runs.
        env: its variables beside those of this session.
        secrets: more of them, masked in the log.
        get_code: request to install the code first, where no controller has done so.
        get_venv: the same for the venv.

    Raises:
        AgentError: the command fails, with the end of its log as detail.
    """
    name = prefix.rpartition("/")[2]
    folder, telling = safe_join("builds", name), ProgressReporter()
    telling.emit({"bytes": 0})
    with locked(f"fetch-{hashlib.sha256(prefix.encode()).hexdigest()[:16]}"):
        if not object_exists(bucket, f"{prefix}/manifest.json"):
            if get_code is not None:
                install_code(**get_code)
            if get_venv is not None:
                _require_pip()
                install_venv(**get_venv)
            if not (folder / "output").is_dir():
                with tool_environment(secrets or {}) as given:
                    variables = program_env(venv, {**(env or {}), **given})
                    failure = _run(folder, argv, code, variables, SecretMask(secrets or {}), bucket)
                if failure is not None:
                    raise failure
            _send(folder, bucket, prefix, telling)
        remove_tree(folder)
    telling.emit({"done": True})


def _run(
    folder: Path, argv: list[str], code: str, env: dict[str, str], mask: SecretMask, bucket: str
) -> FinalError | None:
    """Run the command and return why it failed, if it did; its folder becomes `output` only if it succeeds."""
    _end_earlier(folder)
    work, draft, log = folder / "work", folder / "draft", folder / "build.log"
    for old in (work, draft):
        remove_tree(old)
    check_out(code, work)
    draft.mkdir(mode=0o700)
    words = [word.replace("{output}", str(draft)) for word in argv]
    program = shutil.which(words[0], path=env["PATH"]) or words[0]
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                [program, *words[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=work, env=env,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            return FinalError(f"`{shlex.join(argv)}` cannot start here: {error.strerror}")
        write_json(folder / "process.json", {"pid": process.pid, "start_time": start_time(process.pid)})
        status = process.wait()
    mask.mask_file(log)
    why = f"ended with code {status}" if status else "" if any(draft.iterdir()) else "wrote no file to {output}"
    if why:
        name = f"builds/{folder.name}.log"
        with_retries(lambda: upload_file(log, bucket, name))
        tail = read_range(log, max(0, file_size(log) - TAIL_BYTES), TAIL_BYTES).decode(errors="replace").rstrip()
        where = f"{bucket}/{name}" if is_folder(bucket) else f"gs://{bucket}/{name}"
        return FinalError(f"`{shlex.join(argv)}` {why}; its log is {where}", tail)
    draft.rename(folder / "output")
    return None


def _end_earlier(folder: Path) -> None:
    """End the command of an agent that was killed."""
    earlier = read_json(folder / "process.json")
    if earlier is not None and is_alive(earlier):
        send_signal(os.killpg, earlier["pid"], signal.SIGKILL)


def _send(folder: Path, bucket: str, prefix: str, telling: ProgressReporter) -> None:
    """Copy the files that an earlier agent has not copied; the manifest comes last."""
    output, record, lock = folder / "output", folder / "sent.json", threading.Lock()
    sent: dict[str, str] = (read_json(record) or {"files": {}})["files"]

    def send(path: Path) -> None:
        name = path.relative_to(output).as_posix()
        if name in sent:
            return
        digest = file_hash(path)
        with_retries(lambda: upload_file(path, bucket, f"{prefix}/{name}"))
        telling.add_bytes(file_size(path))
        with lock:
            sent[name] = digest
            write_json(record, {"files": sent})

    found = [p for p in sorted(output.rglob("*")) if p.is_file() and not SKIPPED & set(p.relative_to(output).parts)]
    with ThreadPoolExecutor(max_workers=THREADS) as pool:
        list(pool.map(send, found))
    text = (json.dumps(sent, indent=1, sort_keys=True) + "\n").encode()
    with_retries(lambda: upload_stream([text], len(text), bucket, f"{prefix}/manifest.json"))


def _require_pip() -> None:
    """Let Python install uv: Debian's image has no pip."""
    if importlib.util.find_spec("pip") is None and shutil.which("uv") is None:
        wait = ("-o", "DPkg::Lock::Timeout=300")  # unattended upgrades run at the first boot
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run_tool(["apt-get", *wait, "update", "--quiet"], env=env)
        run_tool(["apt-get", *wait, "install", "--quiet", "--yes", "python3-pip"], env=env)
