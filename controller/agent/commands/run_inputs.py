"""What a run needs on a worker besides packages: code, run.yaml, environment, data, and what setup commands make."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ..attempts import SecretMask, delete_secrets, store_secrets
from ..attempts import secret_environment as secrets_of
from ..fs import (
    AgentError,
    current_tree_hash,
    file_hash,
    file_size,
    locked,
    read_json,
    read_range,
    remove_tree,
    safe_join,
    tree_files,
    tree_hash,
    write_atomic,
    write_json,
)
from ..worker_processes import run_tool
from .venv import NO_VENV, accept_changes, applied_setup_key, program_env, venv_folder, venv_state

if TYPE_CHECKING:
    from ..protocol import Changed, Fingerprints, InstalledCode, WrittenConfig

MAX_BYTES = 1 << 30
MAX_FILES = 100_000


def install_code(bucket: str, object: str, sha256: str, tree: str) -> InstalledCode:
    """Download a tree from the bucket, unless it is installed and unchanged.

    Args:
        bucket: bucket of the archive.
        object: tar archive of files and links, compressed or not.
        sha256: SHA-256 of the archive.
        tree: `tree_hash` of its content.
    """
    from ..transfers import download_object, with_retries  # importing HTTP takes a third of `observe`'s start-up time

    folder = safe_join("code", tree)
    with locked(f"code-{tree}"):
        if current_tree_hash(folder) == tree:
            return {"tree": tree, "changed": False}
        archive, fresh, old = (folder.with_name(f".{tree}.{word}") for word in ("archive", "new", "old"))
        archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with_retries(lambda: download_object(bucket, object, sha256, archive))
        remove_tree(fresh)
        try:
            unpack(archive, fresh)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise AgentError(f"cannot unpack gs://{bucket}/{object}: {error}") from error
        if (found := tree_hash(fresh)) != tree:
            raise AgentError(f"gs://{bucket}/{object} contains the tree {found}, expected {tree}")
        remove_tree(old)
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        remove_tree(old)
        archive.unlink()
    return {"tree": tree, "changed": True}


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive of files, folders and links inside it into a new folder.

    Raises AgentError if the archive holds devices, compiled Python, paths or links that lead outside it, or more than
    MAX_FILES or MAX_BYTES.
    """
    files = total = 0
    links: dict[Path, str] = {}  # made last, so that no file is written through one
    folder.mkdir(parents=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            files, total = files + 1, total + member.size
            if member.name.startswith("/") or ".." in parts:
                raise AgentError(f"the archive contains {member.name!r}, which leads outside it")
            if not (member.isfile() or member.isdir() or member.issym()):
                raise AgentError(f"the archive contains {member.name!r}, which is no file, folder or link")
            if "__pycache__" in parts:  # which no hash covers
                raise AgentError(f"the archive contains {member.name!r}, which Python would run in place of its source")
            if files > MAX_FILES or total > MAX_BYTES:
                raise AgentError(f"the archive contains more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB")
            path = folder.joinpath(*parts)
            if member.issym():
                links[path] = member.linkname
                continue
            (path if member.isdir() else path.parent).mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            if content:
                with content, path.open("xb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o700 if member.mode & 0o100 else 0o600)
    for path, target in links.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
        is_inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
        if target.startswith("/") or target != os.path.normpath(target) or not is_inside:  # x/.. depends on later links
            path.unlink()
            raise AgentError(f"the archive contains the link {path.name!r} to {target!r}, which leads outside it")


def check_out(code: str, work: Path) -> str:
    """Copy the code into the working directory of a run and return the hash of the copy.

    A program may write files next to its code. In place, they would look like modified code and leak into other runs.
    """
    source = safe_join("code", code)
    if not source.is_dir():
        raise AgentError(f"the code {code} is not on this worker: install it first")
    work.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = tree_files(source)
    for name in names:
        target = work / name
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy(source / name, target, follow_symlinks=False)
    return tree_hash(work, names)


def write_config(run_id: str, text: str, env: dict[str, str] | None = None) -> WrittenConfig:
    """Write run.yaml and the environment variables of every attempt of the run."""
    folder = safe_join("runs", run_id)
    write_json(folder / "env", {"variables": validate_env(env or {})})
    write_atomic(folder / "run.yaml", text.encode())
    return {"path": str(folder / "run.yaml"), "sha256": file_hash(folder / "run.yaml")}


def validate_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise AgentError(f"{name!r} is not a valid name of an environment variable")
        if not isinstance(value, str) or "\0" in value:
            raise AgentError(f"the value of environment variable {name} is not valid")
    return env


def run_environment(
    run: Path, venv: str, env: dict[str, str], own: dict[str, str], defaults: dict[str, str] | None = None
) -> dict[str, str]:
    """Return a program's environment; `own` overrides `env`, which overrides the variables of `write_config`.

    These and the variables of this VM override `defaults`.
    """
    own = {"SLIPWAY_RUN_DIR": str(run), "SLIPWAY_RUN_ID": run.name, **own}
    usual = {
        "PYTHONFAULTHANDLER": "1",  # an aborted Python program prints its stacks: see `stacks`
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # no gRPC probe of each bucket; what the tests run
    }
    usual |= {name: value for name, value in (defaults or {}).items() if name not in os.environ}
    kept = read_json(run / "env") or {"variables": {}}
    return program_env(venv, {**usual, **kept["variables"], **env, **own})


def fingerprint_data(run_id: str, code: str, venv: str, timeout_seconds: float = 300.0) -> Fingerprints:
    """Return fingerprints of the files that run.yaml names, freshly taken by the trainer's own code and venv.

    Args:
        run_id: run whose run.yaml is on this worker.
        code: tree hash of the installed code, which contains the trainer.
        venv: fingerprint of an installed venv, or "none".
        timeout_seconds: limit for all of them.
    """
    run, folder = safe_join("runs", run_id), safe_join("code", code)
    for needed, path in (("run.yaml", run / "run.yaml"), ("the code", folder)):
        if not path.exists():
            raise AgentError(f"{needed} is missing")
    python = "python3" if venv == NO_VENV else f"{venv_folder(venv)}/bin/python"
    command = ["trainer.distributed.fingerprint", str(run / "run.yaml")]
    environment = run_environment(run, venv, {}, {})
    given = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), given)))
    printed = run_tool([python, "-m", *command], timeout=timeout_seconds, env=environment, folder=folder)
    return {"data": json.loads(printed.splitlines()[-1])}


TAIL_BYTES = 4000


def run_setup(
    run_id: str, key: str, commands: list[list[str]], code: str, venv: str, secrets: dict[str, str] | None = None
) -> Changed:
    """Run the commands in order, in the venv and the run's copy of the code, unless those of this key already ran.

    Raises AgentError if a command failed; the detail is the end of its output.

    Args:
        run_id: run that the setup belongs to.
        key: hash of everything that the result depends on.
        commands: argument vectors, run without a shell.
        code: tree hash of installed code.
        venv: fingerprint of an installed venv.
        secrets: variables on top of those of `write_config`, deleted afterwards and masked in the output.
    """
    run = safe_join("runs", run_id)
    with locked(f"setup-{run_id}"):
        if applied_setup_key(run_id, venv) == key:
            return {"changed": False}
        current = venv_state(venv)
        if not current:
            raise AgentError(f"the venv {venv} is not on this worker: install it first")
        (run / "setup.log").unlink(missing_ok=True)
        store_secrets(run, validate_env(secrets or {}))
        try:
            own = {"SLIPWAY_CODE_SHA256": check_out(code, run / "work")}
            environment = run_environment(run, venv, secrets_of(run), own)
            for argv in commands:
                _run_command(run, argv, environment, SecretMask.for_run(run))
        finally:
            delete_secrets(run)
        accept_changes(venv)
        write_json(run / "setup.json", {"key": key, "venv": current["id"]})
    return {"changed": True}


def _run_command(run: Path, argv: list[str], environment: dict[str, str], mask: SecretMask) -> None:
    path = run / "setup.log"
    with path.open("ab") as log:
        log.write(f"$ {shlex.join(argv)}\n".encode())
        log.flush()
        program = shutil.which(argv[0], path=environment["PATH"]) or argv[0]  # otherwise the agent's PATH would be used
        try:
            code = subprocess.run(
                [program, *argv[1:]], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=run / "work",
                env=environment, check=False,
            ).returncode  # fmt: skip
        except OSError as error:
            raise AgentError(f"setup command `{shlex.join(argv)}` cannot start: {error}") from error
    mask.mask_file(path)
    if code:
        tail = read_range(path, max(0, file_size(path) - TAIL_BYTES), TAIL_BYTES).decode(errors="replace")
        raise AgentError(f"setup command `{shlex.join(argv)}` ended with code {code}", tail)
