import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from controller.agent.commands.venv import installed_versions, program_env
from tests.controller.agent.conftest import AgentWorker
from tests.controller.inputs.wheels import write_wheel

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def python_in(worker: AgentWorker, fingerprint: str, script: str) -> str:
    python = worker.root / "venv" / fingerprint / "bin/python"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with one small wheel, `tiny_thing` 1.2."""
    (folder := tmp_path / "wheels").mkdir()
    write_wheel(folder, "tiny_thing", "1.2")
    return folder


@pytest.fixture
def lock(wheels: Path) -> dict[str, str]:
    sha256 = hashlib.sha256((wheels / "tiny_thing-1.2-py3-none-any.whl").read_bytes()).hexdigest()
    requirements = f"tiny-thing==1.2 --hash=sha256:{sha256}\n"
    return {
        "packages": "lock",
        "fingerprint": "f1",
        "python": PYTHON,
        "requirements": requirements,
        "index": str(wheels),
    }


def test_a_venv_is_made_from_a_lock_once(worker: AgentWorker, lock: dict[str, str]) -> None:
    assert worker.call("observe", venv="f1")["venv"] is None
    made = worker.call("install_venv", **lock)
    assert made.pop("changed")
    assert (made["fingerprint"], made["ok"], made["versions"]) == ("f1", True, {"tiny-thing": "1.2"})
    assert worker.call("install_venv", **lock) == {**made, "changed": False}
    assert worker.call("observe", venv="f1")["venv"] == made
    assert python_in(worker, "f1", "import tiny_thing; print(tiny_thing.answer)") == "42"


def test_a_wrong_hash_installs_nothing(worker: AgentWorker, lock: dict[str, str]) -> None:
    wrong = lock["requirements"][:-10] + "0" * 9 + "\n"
    answer = worker.call_error("install_venv", **{**lock, "requirements": wrong})
    assert "uv pip failed" in answer["error"]
    assert "tiny-thing" in answer["detail"]
    assert worker.call("observe", venv="f1")["venv"] is None
    assert worker.call("install_venv", **lock)["changed"], "the next try is not hindered"


def test_altered_packages_show_and_are_repaired(worker: AgentWorker, lock: dict[str, str]) -> None:
    worker.call("install_venv", **lock)
    [site] = (worker.root / "venv/f1").glob("lib/python*/site-packages")
    (site / "tiny_thing-1.2.dist-info").rename(site / "tiny_thing-1.3.dist-info")
    seen = worker.call("observe", venv="f1")["venv"]
    assert (seen["ok"], seen["versions"]["tiny-thing"]) == (False, "1.3")
    assert worker.call("install_venv", **lock)["versions"] == {"tiny-thing": "1.2"}
    (worker.root / "venv/f1/slipway.json").unlink()
    shutil.rmtree(worker.root / "venv/f1/lib")
    assert worker.call("observe", venv="f1")["venv"] is None, "half a venv is none"
    assert worker.call("install_venv", **lock)["changed"]
    assert python_in(worker, "f1", "import tiny_thing") == ""


def test_several_at_once_make_one(worker: AgentWorker, lock: dict[str, str]) -> None:
    answers = [
        worker.finish_command(p)[1][-1] for p in [worker.start_command("install_venv", **lock) for _ in range(3)]
    ]
    assert sorted(answer["changed"] for answer in answers) == [False, False, True]


def test_the_packages_of_the_image_are_seen_and_nothing_is_downloaded(worker: AgentWorker) -> None:
    seen = worker.call("observe", venv="image")
    assert seen["venv"] is None
    made = worker.call("install_venv", packages="image", python=PYTHON, fingerprint="image")
    assert made["fingerprint"] == seen["image"]["fingerprint"]
    assert made["versions"] == seen["image"]["versions"]
    assert made["versions"]["pytest"] == pytest.__version__
    assert worker.call("observe", venv="image")["venv"]["ok"]
    assert python_in(worker, made["fingerprint"], "import pytest; print(pytest.__version__)") == pytest.__version__
    assert not worker.call("install_venv", packages="image", python=PYTHON, fingerprint=made["fingerprint"])["changed"]


def test_another_image_or_kind_is_refused(worker: AgentWorker) -> None:
    for packages, words in (("image", "fingerprint"), ("conda", "lock, requirements and image")):
        assert words in worker.call_error("install_venv", packages=packages, python=PYTHON, fingerprint="f2")["error"]


def test_a_requirements_file_leaves_versions_open_and_constraints_fix_them(worker: AgentWorker, wheels: Path) -> None:
    write_wheel(wheels, "tiny_thing", "1.3")
    order = {"packages": "requirements", "python": PYTHON, "fingerprint": "r1"}
    order["requirements"] = f"--no-index\n--find-links {wheels}\ntiny-thing\n"
    assert worker.call("install_venv", **order)["installed"] == {"tiny-thing": "1.3"}
    fixed = worker.call("install_venv", **order, constraints={"tiny-thing": "1.2"})
    assert (fixed["changed"], fixed["installed"]) == (True, {"tiny-thing": "1.2"})
    assert not worker.call("install_venv", **order, constraints={"tiny-thing": "1.2"})["changed"]
    assert "uv pip failed" in worker.call_error("install_venv", **order, constraints={"tiny-thing": "9"})["error"]


def test_a_wheel_comes_from_the_bucket(worker: AgentWorker, wheels: Path) -> None:
    wheel = wheels / "tiny_thing-1.2-py3-none-any.whl"
    worker.bucket.objects["wheels/w"] = wheel.read_bytes()
    entry = {"bucket": "b", "object": "wheels/w", "name": wheel.name, "before": "tiny-thing", "after": ""}
    order = {"packages": "requirements", "python": PYTHON, "fingerprint": "r1", "requirements": "--no-index\n"}
    right = {**entry, "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}
    made = worker.call("install_venv", **order, wheels=[right], constraints={"tiny-thing": "1.2"})
    assert made["installed"] == {"tiny-thing": "1.2"}
    assert python_in(worker, "r1", "import tiny_thing; print(tiny_thing.answer)") == "42"


def test_secrets_open_a_private_index_and_are_gone_afterwards(worker: AgentWorker, tmp_path: Path) -> None:
    """A stand-in for uv says what it sees; its complaint is masked."""
    (tools := tmp_path / "tools").mkdir()
    (tools / "uv").write_text('#!/bin/sh\n[ "$1" = venv ] || { cat "$NETRC" >&2; echo "error: $KEY" >&2; exit 2; }\n')
    (tools / "uv").chmod(0o700)
    worker.extra_environment = {"PATH": f"{tools}:{worker.environment['PATH']}"}
    order = {"packages": "requirements", "python": PYTHON, "fingerprint": "r1", "requirements": "tiny-thing\n"}
    secrets = {"NETRC": "machine index password open-sesame\n", "KEY": "hf_secret"}
    said = worker.call_error("install_venv", **order, secrets=secrets)
    assert said["error"] == "uv pip failed with exit code 2: error: *********"
    assert said["detail"].startswith("machine index password ***********\n")
    assert not [p for p in worker.home.rglob("*") if p.is_file() and b"open-sesame" in p.read_bytes()]


def test_no_venv_is_the_python_of_the_image(worker: AgentWorker) -> None:
    seen = worker.call("observe", venv="none")["venv"]
    assert (seen["ok"], seen["versions"]["pytest"]) == (True, pytest.__version__)
    assert not (worker.root / "venv").exists()


def test_versions_are_read_off_the_names_of_metadata(tmp_path: Path) -> None:
    for name in ("jax-0.10.2.dist-info", "orbax_checkpoint-0.12.8+local.dist-info", "PyYAML-6.0.egg-info", "jax"):
        (tmp_path / name).mkdir()
    (tmp_path / "Old_Thing-2-py3.10.egg-info").write_text("")
    expected = {"jax": "0.10.2", "orbax-checkpoint": "0.12.8+local", "pyyaml": "6.0", "old-thing": "2"}
    assert installed_versions([tmp_path]) == expected


def test_uv_is_installed_beside_the_venvs_where_the_image_has_none(worker: AgentWorker, tmp_path: Path) -> None:
    """A stand-in for pip writes a stand-in for uv: nothing is fetched here."""
    fake = tmp_path / "fake/pip"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("")
    (fake / "__main__.py").write_text(
        "import pathlib, sys\n"
        "target = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]) / 'bin'\n"
        "target.mkdir(parents=True)\n"
        "(target / 'uv').write_text('#!/bin/sh\\nmkdir -p \"$5/bin\" && ln -s /bin/sh \"$5/bin/python\"\\n')\n"
        "(target / 'uv').chmod(0o700)\n"
        "print(sys.argv, file=open(pathlib.Path.home() / 'pip', 'a'))\n"
    )
    (tools := tmp_path / "tools").mkdir()
    for name in ("mkdir", "ln"):
        (tools / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    worker.extra_environment = {"PATH": str(tools), "PYTHONPATH": str(fake.parent)}
    assert worker.call("install_venv", packages="image", python=PYTHON, fingerprint="image")["ok"]
    assert "--require-hashes" in (worker.home / "pip").read_text()
    assert re.match(r"uv==\S+ --hash=sha256:[0-9a-f]{64}$", (worker.root / "uv.txt").read_text().strip())
    assert json.loads((next((worker.root / "venv").iterdir()) / "slipway.json").read_text())


@pytest.mark.parametrize(
    ("given", "begins"),
    [
        ("/own/bin", ["/own/bin", "/usr/bin"]),
        ("/own:/usr/bin", ["/own", "/usr/bin"]),
        ("", ["/usr/bin"]),
        (None, ["/usr/bin"]),
    ],
)
def test_a_path_of_the_users_stands_before_that_of_the_worker(
    monkeypatch: pytest.MonkeyPatch, given: str | None, begins: list[str]
) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    variables = {} if given is None else {"PATH": given}
    path = program_env("none", variables)["PATH"].split(":")
    assert path[: len(begins) + 1] == [*begins, "/bin"]
    of_venv = program_env("v1", variables)["PATH"].split(":")
    assert of_venv[0].endswith("/bin")
    assert of_venv[1:] == path
