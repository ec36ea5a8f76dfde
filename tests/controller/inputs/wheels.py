"""Small packages, as wheels and as git repositories that build without an index."""

import base64
import hashlib
import subprocess
import zipfile
from email import message_from_string
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

BUILD_BACKEND = """
import base64, hashlib, pathlib, zipfile
NAME = "{name}"
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    files = {{NAME + ".py": pathlib.Path(NAME + ".py").read_text(), NAME + "-1.0.dist-info/METADATA":
        "Metadata-Version: 2.1\\nName: " + NAME + "\\nVersion: 1.0\\n", NAME + "-1.0.dist-info/WHEEL":
        "Wheel-Version: 1.0\\nGenerator: t\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"}}
    files[NAME + "-1.0.dist-info/RECORD"] = "".join(name + ",,\\n" for name in files)
    wheel = NAME + "-1.0-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel
"""


def write_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel with one module that holds `answer = 42`."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "answer = 42\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return target


def pack_installed(folder: Path, *names: str) -> None:
    """Wheels of packages of this interpreter, and of what they need."""
    wanted, packed = [*names], set[str]()
    while wanted:
        found = distribution(wanted.pop())
        if found.name in packed:
            continue
        packed.add(found.name)
        needs = [Requirement(line) for line in found.requires or []]
        wanted += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
        tag = message_from_string(found.read_text("WHEEL") or "")["Tag"]
        paths = [path for path in found.files or [] if ".." not in path.parts and path.suffix != ".pyc"]
        [record] = [path for path in paths if path.name == "RECORD" and path.parent.suffix == ".dist-info"]
        with zipfile.ZipFile(folder / f"{str(record.parent).removesuffix('.dist-info')}-{tag}.whl", "w") as wheel:
            for path in paths:
                if path != record:
                    wheel.write(path.locate(), str(path))
            wheel.writestr(str(record), "".join(f"{path},,\n" for path in paths))


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def package_repository(folder: Path, name: str) -> str:
    """A git repository of a package whose build needs nothing from an index; returns its commit."""
    system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    files = {"backend.py": BUILD_BACKEND.format(name=name), f"{name}.py": "answer = 43\n"}
    project = f'[project]\nname = "{name}"\nversion = "1.0"\n'
    return git_repository(folder, {**files, "pyproject.toml": system + project})


def git_repository(folder: Path, files: dict[str, str]) -> str:
    """A git repository with one commit, which is returned."""
    write(folder, files)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--message=one")
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
