"""The workers' Python end to end on the emulated cloud: requirements, private packages, setup, no venv."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.controller.conftest import ECHO_COMMAND, SlipwayCli
from tests.controller.inputs.wheels import git_repository, pack_installed, package_repository, write_wheel

pytestmark = pytest.mark.e2e
PYTHON = f"env.python='{sys.version_info.major}.{sys.version_info.minor}'"
ONE = "tpu.accelerator_type=v5litepod-4"
KEEP = "cleanup.on_success=keep"
TWO_WORKERS = ("tpu.accelerator_type=v4-16", "tpu.zone=us-central2-b")


@pytest.mark.deep
def test_requirements_and_private_packages_are_the_same_on_all_workers(slipway: SlipwayCli, tmp_path: Path) -> None:
    (wheels := tmp_path / "wheels").mkdir()
    write_wheel(wheels, "tiny_thing", "1.2")
    commit = package_repository(tmp_path / "private", "private_thing")
    lines = ["--no-index", f"--find-links {wheels}", "tiny-thing", f"p @ git+file://{tmp_path}/private@{commit}"]
    (slipway.repository / "needs.txt").write_text("\n".join(lines).replace("p @", "private_thing @"))
    ask = 'import private_thing, tiny_thing; print("sum", private_thing.answer + tiny_thing.answer)'
    words = [f"program.command=[python,-c,'{ask}']", "env.requirements=needs.txt", PYTHON, KEEP, *TWO_WORKERS]
    slipway.packages = "requirements"
    code, out, err = slipway("up", *words)
    assert (code, err) == (0, "")
    assert "sum 85" in out
    assert "wheels of 1 git repositories" in out
    homes = sorted((slipway.home / "localcloud" / "nodes").glob("*/worker-*/home"))
    assert len(homes) == 2
    found = [json.loads(next(home.glob(".slipway/venv/*/slipway.json")).read_text())["versions"] for home in homes]
    assert found == [{"private-thing": "1.0", "tiny-thing": "1.2"}] * 2
    # A newer version does not sneak in on the one worker whose venv has to be made anew.
    write_wheel(wheels, "tiny_thing", "1.3")
    next(homes[1].glob(".slipway/venv/*/slipway.json")).unlink()
    (slipway.repository / "hello.txt").write_text("a new run\n")
    assert slipway("up", *words)[0] == 0
    again = json.loads(next(homes[1].glob(".slipway/venv/*/slipway.json")).read_text())["versions"]
    assert again == found[0]


@pytest.mark.deep
def test_requirements_of_ones_own_bring_a_current_jax(slipway: SlipwayCli, tmp_path: Path) -> None:
    """The JAX of this Python; `.ci/run` has it on that of the pods as well."""
    (wheels := tmp_path / "wheels").mkdir()
    pack_installed(wheels, "jax")
    series = ".".join(version("jax").split(".")[:2])
    (slipway.repository / "needs.txt").write_text(f"--no-index\n--find-links {wheels}\njax=={series}.*\n")
    ask = 'import jax; print("sum", jax.numpy.arange(10).sum(), "by JAX", jax.__version__)'
    slipway.packages = "requirements"
    code, out, err = slipway("up", f"program.command=[python,-c,'{ask}']", "env.requirements=needs.txt", PYTHON, ONE)
    assert (code, err) == (0, "")
    assert f"sum 45 by JAX {version('jax')}" in out


@pytest.mark.deep
def test_setup_runs_once_on_each_worker_and_shows_who_failed(slipway: SlipwayCli) -> None:
    picky = "[ $TPU_WORKER_ID != 1 ] || [ -e ../go ] || (echo no license; exit 3)"
    setup = f'[[sh,-c,"echo once >> ../times"],[sh,-c,"{picky}"]]'
    words = ["up", "program.command=[cat,../times]", f"program.setup={setup}", KEEP, *TWO_WORKERS]
    code, _, err = slipway(*words)
    assert code == 1
    assert "worker 1 printed:" in err
    assert "no license" in err
    assert "ended with code 3" in err
    for run in (slipway.home / "localcloud" / "nodes").glob("*/worker-1/home/.slipway/runs/*"):
        (run / "go").touch()
    code, out, _ = slipway(*words)
    assert code == 0
    assert out.count("once") == 1  # worker 0 had been done
    assert slipway.json("logs", "--worker", "1", *words[1:]) == {"log": "once\nonce\n"}


@pytest.mark.deep
def test_workers_are_tidied_and_a_full_disk_names_worker_and_key(slipway: SlipwayCli) -> None:
    assert slipway("up", ONE, ECHO_COMMAND, KEEP)[0] == 0
    [place] = (slipway.home / "localcloud" / "nodes").glob("*/worker-0")
    (lock := place / "tmp/libtpu_lockfile").touch()
    (slipway.repository / "hello.txt").write_text("another run\n")
    code, out, _ = slipway("up", ONE, ECHO_COMMAND, KEEP)
    assert code == 0
    assert "removed the stale" in out
    assert not lock.exists()
    code, _, err = slipway("up", ONE, ECHO_COMMAND, KEEP, "env.min_free_gb=1e9", "run.name=other")
    assert code == 1
    assert "env.min_free_gb: worker 0 has " in err
    assert slipway("verify", ONE, ECHO_COMMAND, KEEP, "env.min_free_gb=1e9")[0] == 4


def test_without_a_venv_and_git_is_on_record_beside_the_results(slipway: SlipwayCli) -> None:
    commit = git_repository(slipway.repository, {"train.py": "lr = 1\n"})
    (slipway.repository / "train.py").write_text("lr = 2\n")
    slipway.packages = "none"
    words = (ONE, 'program.command=[sh,-c,"echo venv=$VIRTUAL_ENV."]')
    assert "no venv: the image's Python" in slipway("plan", *words)[1]
    code, out, _ = slipway("up", *words)
    assert code == 0
    assert "venv=." in out
    run = slipway.json("status", *words)["run"]["id"]
    objects = json.dumps(slipway.cloud().get("state")["objects"])
    assert f"runs/{run}/git.json" in objects
    assert f"runs/{run}/diff.patch" in objects
    blobs = (slipway.home / "localcloud/blobs").rglob("*")
    assert commit.encode() in b"".join(p.read_bytes() for p in blobs if p.is_file())


def test_a_setup_that_leaves_workers_different_is_refused(slipway: SlipwayCli) -> None:
    site = "$(python -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    (slipway.repository / "install.sh").write_text(f'mkdir -p "{site}/thing-1.$TPU_WORKER_ID.dist-info"\n')
    slipway.packages = "requirements"
    code, _, err = slipway("up", ONE, "program.command=[echo]", "env.requirements=other.txt")
    assert code == 2
    assert err.startswith("error: env.requirements: other.txt is not among the files shipped")
    code, _, err = slipway("up", "program.command=[echo]", "program.setup=[[sh,install.sh]]", PYTHON, *TWO_WORKERS)
    assert code == 4
    assert "thing is 1.1 on worker 1 and 1.0 on worker 0; pin its version in program.setup" in err
