"""Virtual environments: created by uv from a lock file, from requirements, or from the packages of the image."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attempts import tool_environment
from ..fs import AgentError, agent_root, locked, read_json, remove_tree, safe_join, write_atomic, write_json
from ..worker_processes import run_tool

if TYPE_CHECKING:
    from ..protocol import InstalledVenv, VenvState, Wheel

NO_VENV = "none"
UV = "uv==0.13.9 --hash=sha256:d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19\n"
"""Line of a requirements file, for Linux on x86-64 like all TPU VMs; used only if the image has no uv."""


def installed_versions(folders: Iterable[Path]) -> dict[str, str]:
    """Return the versions of the distributions in these folders, parsed from metadata file names, which is fast."""
    found: dict[str, str] = {}
    for name in (name for folder in folders for name in os.listdir(folder) if name.endswith("-info")):  # noqa: PTH208
        if match := re.fullmatch(r"(.+?)-([0-9][^-]*)(-py[0-9.]+)?\.(dist|egg)-info", name):
            found.setdefault(match[1].lower().replace("_", "-"), match[2])
    return found


def image_python() -> dict[str, Any]:
    """Describe the image's own Python, which runs the agent, as {python, fingerprint, versions, folders}."""
    places = (Path(path) for path in sys.path)
    folders = [path for path in places if path.name in ("site-packages", "dist-packages") and path.is_dir()]
    python, versions = ".".join(map(str, sys.version_info[:3])), installed_versions(folders)
    fingerprint = hashlib.sha256(json.dumps([python, sorted(versions.items())]).encode()).hexdigest()
    return {"python": python, "fingerprint": fingerprint, "versions": versions, "folders": [*map(str, folders)]}


def venv_folder(venv: str) -> Path:
    """Return the folder of a venv: a fingerprint, or "image" or "image-<setup hash>" for one based on this image."""
    kind, dash, setup = venv.partition("-")
    return safe_join("venv", f"{image_python()['fingerprint']}{dash}{setup}" if kind == "image" else venv)


def venv_state(venv: str) -> VenvState | None:
    """Return the state of a venv, or None if it is incomplete; "none" is the image's unmodified Python."""
    if venv == NO_VENV:
        versions = image_python()["versions"]
        return {"fingerprint": venv, "ok": True, "versions": versions, "installed": versions, "id": venv}
    folder = venv_folder(venv)
    mark = read_json(folder / "slipway.json")
    if mark is None:
        return None
    versions = _visible_versions(folder, mark["folders"])
    return {
        "fingerprint": folder.name,
        "ok": (folder / "bin" / "python").exists() and versions == mark["versions"],
        "versions": versions,
        "installed": mark["installed"],
        "id": mark["id"],
    }


def install_venv(
    packages: str,
    fingerprint: str,
    python: str,
    requirements: str = "",
    index: str | None = None,
    constraints: dict[str, str] | None = None,
    wheels: list[Wheel] | None = None,
    secrets: dict[str, str] | None = None,
) -> InstalledVenv:
    """Create a virtual environment, unless it exists unchanged.

    It is created in place, because paths inside it are absolute, and counts only once its marker is written.

    Args:
        packages: "lock" installs pins with hashes, "requirements" installs requirements without hashes, "image"
            downloads nothing and exposes the packages of the image's own Python.
        fingerprint: name of the venv; may be "image" if `packages` is.
        python: version of Python for "lock" and "requirements"; an image has its own.
        requirements: content of the requirements file for "lock" and "requirements".
        index: for "lock", a package index instead of the default one: a URL, or a folder of wheels on the worker.
        constraints: for "requirements", required version by name; a venv with other versions is recreated.
        wheels: for "requirements", additional wheels to install.
        secrets: for "requirements", variables of the installer that grant access to a private index; not kept.
    """
    folder = venv_folder(fingerprint)
    with locked(f"venv-{folder.name}"):
        current = venv_state(folder.name)
        if current and current["ok"] and constraints in (None, current["installed"]):
            return {**current, "changed": False}
        remove_tree(folder)
        folders: list[str] = []
        if packages == "image":
            folders = _create_from_image(folder)
        elif packages == "lock":
            _create_from_lock(folder, python, requirements, index)
        elif packages == "requirements":
            fetched = "".join(f"{_download_wheel(folder.name, wheel)}\n" for wheel in wheels or [])
            with tool_environment(secrets or {}) as env:
                _create_from_requirements(folder, python, requirements + fetched, constraints or {}, env)
        else:
            raise AgentError(f"packages is {packages!r}; the choices are lock, requirements and image")
        versions = _visible_versions(folder, folders)
        mark = {"folders": folders, "versions": versions, "installed": versions, "id": os.urandom(8).hex()}
        write_json(folder / "slipway.json", mark)
        made = venv_state(folder.name)
        assert made, "it was marked just now"
        return {**made, "changed": True}


def applied_setup_key(run_id: str, venv: str) -> str | None:
    """Return the key of the run's setup on this worker, or None if it did not run or its venv was recreated since."""
    done, current = read_json(safe_join("runs", run_id) / "setup.json"), venv_state(venv)
    return done["key"] if done and current and done["venv"] == current["id"] else None


def accept_changes(venv: str) -> None:
    """Accept packages that a setup has installed or removed as part of the venv."""
    if venv != NO_VENV:
        folder = venv_folder(venv)
        mark: dict[str, Any] = read_json(folder / "slipway.json")
        write_json(folder / "slipway.json", {**mark, "versions": _visible_versions(folder, mark["folders"])})


def _create_from_image(folder: Path) -> list[str]:
    here = image_python()
    if folder.name.partition("-")[0] != here["fingerprint"]:
        raise AgentError(f"this image's packages have the fingerprint {here['fingerprint']}, expected {folder.name}")
    _create_venv(folder, sys.executable)
    for own in _site_packages(folder):
        (own / "slipway.pth").write_text("".join(f"{path}\n" for path in here["folders"]))
    return here["folders"]


def _create_from_lock(folder: Path, python: str, requirements: str, index: str | None) -> None:
    _create_venv(folder, python)
    lock = folder / "requirements.txt"
    write_atomic(lock, requirements.encode())
    source = []
    if index:
        source = [f"--index-url={index}"] if re.match("https?://", index) else ["--no-index", f"--find-links={index}"]
    run_tool([uv(), "pip", "sync", "--quiet", "--require-hashes", f"--python={folder}/bin/python", *source, str(lock)])


def _create_from_requirements(
    folder: Path, python: str, requirements: str, constraints: dict[str, str], env: dict[str, str]
) -> None:
    _create_venv(folder, python)
    wanted, exact = folder / "requirements.txt", folder / "constraints.txt"
    write_atomic(wanted, requirements.encode())
    # A wheel of a local folder cannot be constrained as well.
    own = re.sub(r"\[[^\]]*\]", "", requirements.lower().replace("_", "-"))
    pins = [f"{name}=={version}\n" for name, version in constraints.items() if f"{name} @ " not in own]
    write_atomic(exact, "".join(pins).encode())
    argv = [uv(), "pip", "install", "--quiet", f"--python={folder}/bin/python", f"--constraint={exact}", f"-r{wanted}"]
    run_tool(argv, env={**os.environ, **env})


def _download_wheel(venv: str, wheel: Wheel) -> str:
    """Download a wheel and return its line for a requirements file."""
    from ..transfers import download_object, with_retries  # importing HTTP takes a third of `observe`'s start-up time

    folder = safe_join("wheels", venv)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / Path(wheel["name"]).name
    with_retries(lambda: download_object(wheel["bucket"], wheel["object"], wheel["sha256"], target))
    return f"{wheel['before']} @ {target.as_uri()}{wheel['after']}"


def _create_venv(folder: Path, python: str) -> None:
    """Create an empty venv of a version of Python, or of an interpreter; this one where it has the version.

    uv finds it on PATH at most, and not there if it is in a venv itself, as on an emulated worker.
    """
    own = ".".join(map(str, sys.version_info[:2]))
    python = sys.executable if python == own else python
    run_tool([uv(), "venv", "--quiet", "--no-project", f"--python={python}", str(folder)])


def _site_packages(folder: Path) -> list[Path]:
    return [*folder.glob("lib/python*/site-packages")]


def _visible_versions(folder: Path, others: list[str]) -> dict[str, str]:
    return installed_versions([*_site_packages(folder), *filter(Path.is_dir, map(Path, others))])


def uv() -> str:
    """Return the path of uv: that of the image, or else one that the agent installs beside the venvs."""
    import shutil

    own = agent_root() / "uv"
    if found := shutil.which("uv", path=f"{os.environ.get('PATH', '')}:{Path.home()}/.local/bin:{own}/bin"):
        return found
    with locked("uv"):
        draft = agent_root() / ".uv"
        remove_tree(draft)
        write_atomic(agent_root() / "uv.txt", UV.encode())
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--only-binary=:all:"]
        run_tool([*pip, f"--requirement={agent_root()}/uv.txt", "--target", str(draft)])
        remove_tree(own)
        draft.rename(own)
    return str(own / "bin" / "uv")


def program_env(venv: str, env: dict[str, str]) -> dict[str, str]:
    """Return the environment of a program in a venv: that of this session, then `env`, then the venv.

    A PATH of `env` stands before this session's, without which there is no program. PATH
    includes the agent's `uv` for setup commands, because TPU VM images have none.
    """
    merged = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
    path = dict.fromkeys([*env.get("PATH", "").split(":"), *os.environ.get("PATH", os.defpath).split(":")])
    merged["PATH"] = f"{':'.join(filter(None, path))}:{Path.home()}/.local/bin:{agent_root()}/uv/bin"
    if venv == NO_VENV:
        return merged
    folder = venv_folder(venv)
    merged.pop("PYTHONHOME", None)
    return {**merged, "VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin:{merged['PATH']}"}
