"""Setup commands of the user, run once on each worker before the program starts."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from ..fs import AgentError, file_size, locked, read_range, safe_join, write_json
from ..secrets import SecretMask, delete_secrets, store_secrets
from ..secrets import secret_environment as secrets_of
from .code import check_out
from .config import run_environment, validate_env
from .venv import accept_changes, applied_setup_key, venv_state

if TYPE_CHECKING:
    from ..protocol import Changed

TAIL_BYTES = 4000


def run_setup(
    run_id: str, key: str, commands: list[list[str]], code: str, venv: str, secrets: dict[str, str] | None = None
) -> Changed:
    """Run the commands in order, in the venv and the run's copy of the code, unless those of this key already ran.

    Args:
        run_id: run that the setup belongs to.
        key: hash of everything that the result depends on.
        commands: argument vectors, run without a shell.
        code: tree hash of installed code.
        venv: fingerprint of an installed venv.
        secrets: variables on top of those of `write_config`, deleted afterwards and masked in the output.

    Raises:
        AgentError: a command failed; the detail is the end of its output.
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
