"""Code and config on a worker: they arrive whole or not at all, and every alteration shows."""

import hashlib
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from controller.agent.commands import run_inputs
from controller.agent.fs import AgentError, current_tree_hash, tree_files, tree_hash
from tests.controller.agent.conftest import AgentWorker, make_archive

FILES: dict[str, str | bytes] = {"trainer/main.py": "print(1)\n", "conf/a.yaml": "a: 1\n", "data.bin": bytes(300_000)}


def test_code_is_brought_once(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES)
    assert worker.call("observe", code=order["tree"])["code"] is None
    assert worker.call("install_code", **order) == {"tree": order["tree"], "changed": True}
    assert worker.call("install_code", **order) == {"tree": order["tree"], "changed": False}
    assert worker.call("observe", code=order["tree"])["code"] == order["tree"]
    assert worker.bucket.requests == [f"GET {order['object']}"]
    assert [p.name for p in (worker.root / "code").iterdir()] == [order["tree"]], "nothing else is left"


@pytest.mark.parametrize(
    ("of_the_vm", "of_the_user", "expected"),
    [
        ({}, {}, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}),
        ({"TPU_WORKER_HOSTNAMES": "c,d"}, {}, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "c,d"}),
        ({"TPU_WORKER_ID": ""}, {}, {"TPU_WORKER_ID": "", "TPU_WORKER_HOSTNAMES": "a,b"}),
        ({"TPU_WORKER_ID": "7"}, {"TPU_WORKER_ID": "0"}, {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,b"}),
        ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "localhost"}),
    ],
)
def test_what_the_vm_and_the_user_say_overrides_the_defaults(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    of_the_vm: dict[str, str],
    of_the_user: dict[str, str],
    expected: Any,
) -> None:
    monkeypatch.setenv("SLIPWAY_AGENT_ROOT", str(tmp_path))
    for name in expected:
        monkeypatch.delenv(name, raising=False)
    for name, value in of_the_vm.items():
        monkeypatch.setenv(name, value)
    run_inputs.write_config("r", "x", of_the_user)
    defaults = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}
    made = run_inputs.run_environment(tmp_path / "runs/r", run_inputs.NO_VENV, {}, {}, defaults)
    assert {name: made[name] for name in expected} == expected


def test_an_altered_byte_shows_and_is_repaired(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES)
    worker.call("install_code", **order)
    main = worker.root / "code" / order["tree"] / "trainer/main.py"
    main.write_text("print(2)\n")
    assert worker.call("observe", code=order["tree"])["code"] not in (None, order["tree"])
    assert worker.call("install_code", **order)["changed"]
    assert main.read_text() == "print(1)\n"
    assert worker.call("observe", code=order["tree"])["code"] == order["tree"]


def test_a_bad_download_is_repeated(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES)
    worker.bucket.faults.append("corrupt")
    assert worker.call("install_code", **order)["changed"]
    assert len(worker.bucket.requests) == 2
    assert worker.call("observe", code=order["tree"])["code"] == order["tree"]


def test_a_missing_archive_is_said_at_once(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES) | {"object": "code/other.tar.gz"}
    assert "HTTP 404" in worker.call_error("install_code", **order)["error"]
    assert len(worker.bucket.requests) == 1


def test_an_archive_of_another_tree_is_refused(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES) | {"tree": "0" * 64}
    assert "contains the tree" in worker.call_error("install_code", **order)["error"]
    assert worker.call("observe", code="0" * 64)["code"] is None
    worker.bucket.objects["x"] = content = make_archive({"good": "x"}, _member("good/evil"))
    twice = {"object": "x", "sha256": hashlib.sha256(content).hexdigest()}
    assert "cannot unpack" in worker.call_error("install_code", **order | twice)["error"]


def test_killed_in_mid_download_it_is_simply_repeated(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES)
    worker.bucket.faults.append("hang")
    first = worker.start_command("install_code", **order)
    assert worker.bucket.hang_started.wait(240)
    first.kill()
    first.communicate()
    (worker.root / "code" / f".{order['tree']}.new" / "half").mkdir(parents=True)
    (worker.root / "code" / f".{order['tree']}.old" / "half").mkdir(parents=True)
    assert worker.call("install_code", **order)["changed"]
    assert worker.call("observe", code=order["tree"])["code"] == order["tree"]


def test_several_at_once_bring_it_once(worker: AgentWorker) -> None:
    order = worker.upload_code(FILES)
    answers = [
        worker.finish_command(p)[1][-1] for p in [worker.start_command("install_code", **order) for _ in range(4)]
    ]
    assert sorted(answer["changed"] for answer in answers) == [False, False, False, True]
    assert len(worker.bucket.requests) == 1


def _member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "member",
    [
        _member("../evil"),
        _member("a/../../evil"),
        _member("/tmp/evil"),
        _member("..", tarfile.DIRTYPE),
        _member("evil", tarfile.SYMTYPE, "/etc/passwd"),
        _member("evil", tarfile.SYMTYPE, ".."),
        _member("evil", tarfile.LNKTYPE, "../../x"),
        _member("evil", tarfile.FIFOTYPE),
        _member("evil", tarfile.CHRTYPE),
        _member("good"),
        _member("good/evil"),
        _member("evil/__pycache__/m.cpython-311.pyc"),
        _member("__pycache__", tarfile.SYMTYPE, "good"),
    ],
    ids=lambda member: f"{member.name} {member.type.decode()} {member.linkname}",
)
def test_a_hostile_archive_is_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    (tmp_path / "a.tar.gz").write_bytes(make_archive({"good": "x"}, member))
    with pytest.raises((AgentError, OSError)):  # the latter is an AgentError of `install_code`
        run_inputs.unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"a.tar.gz", "out"}


def test_a_huge_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tar.gz").write_bytes(make_archive({"zeros": bytes(100_000)}))
    monkeypatch.setattr(run_inputs, "MAX_BYTES", 99_999)
    with pytest.raises(AgentError, match="more than"):
        run_inputs.unpack(tmp_path / "a.tar.gz", tmp_path / "out")


def test_modes_are_private_and_keep_what_is_executable(worker: AgentWorker, tmp_path: Path) -> None:
    script = tarfile.TarInfo("run.sh")
    script.mode = 0o4755
    (tmp_path / "a.tar").write_bytes(make_archive({"plain": "x"}, script))
    run_inputs.unpack(tmp_path / "a.tar", tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out/run.sh").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "out/plain").stat().st_mode) == 0o600


def test_only_plain_names_become_folders(worker: AgentWorker) -> None:
    for name in ("../x", "/etc", ".", "..", "a/b", "", "-x\n", "x" * 129):
        assert "not a valid name" in worker.call_error("observe", code=name or ".")["error"]
        assert "not a valid name" in worker.call_error("write_config", run_id=name, text="")["error"]


def test_run_yaml_arrives_byte_for_byte_and_private(worker: AgentWorker) -> None:
    text = "name: 'é'\r\ncommand: $(rm -rf ~) `id` ; \\ \n"
    assert worker.call("observe", run_id="run-1")["config"] is None
    answer = worker.call("write_config", run_id="run-1", text=text, env={"TOKEN": "s3cret"})
    run = worker.root / "runs/run-1"
    assert (run / "run.yaml").read_bytes() == text.encode()
    assert answer == {"path": str(run / "run.yaml"), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    assert worker.call("observe", run_id="run-1")["config"] == answer["sha256"]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (run, run / "env", run / "run.yaml", run.parent)}
    assert modes == {"run-1": 0o700, "env": 0o600, "run.yaml": 0o600, "runs": 0o700}


def test_an_altered_byte_of_run_yaml_shows(worker: AgentWorker) -> None:
    before = worker.call("write_config", run_id="run-1", text="steps: 1\n")["sha256"]
    (worker.root / "runs/run-1/run.yaml").write_text("steps: 2\n")
    assert worker.call("observe", run_id="run-1")["config"] not in (None, before)


def test_what_cannot_be_a_variable_is_refused(worker: AgentWorker) -> None:
    for env in ({"A=B": "x"}, {"": "x"}, {"A B": "x"}, {"A": "x\0y"}, {"A": 1}):
        assert "environment variable" in worker.call_error("write_config", run_id="run-1", text="", env=env)["error"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("a/b.py", "a/c.py", "d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    "alter",
    [
        lambda tree: (tree / "a/b.py").write_text("a/b.pz"),
        lambda tree: (tree / "a/b.py").rename(tree / "a/e.py"),
        lambda tree: (tree / "a/b.py").chmod(0o700),
        lambda tree: (tree / "new").write_text(""),
        lambda tree: (tree / "d.txt").unlink(),
        lambda tree: (tree / "link").symlink_to("d.txt"),
        lambda tree: (tree / "folder").symlink_to("a", target_is_directory=True),
    ],
    ids=["byte", "name", "executable", "added", "removed", "link", "linked folder"],
)
def test_every_alteration_shows(tree: Path, alter) -> None:
    before = tree_hash(tree)
    alter(tree)
    assert tree_hash(tree) != before


@pytest.mark.parametrize("swap", [("a/b.py", "a/c.py"), ("a/b.py", "d.txt")])
def test_contents_belong_to_their_names(tree: Path, swap: tuple[str, str]) -> None:
    before = tree_hash(tree)
    first, second = (tree / name for name in swap)
    texts = first.read_text(), second.read_text()
    first.write_text(texts[1])
    second.write_text(texts[0])
    assert tree_hash(tree) != before


def test_what_python_caches_and_who_may_read_do_not_count(tree: Path) -> None:
    before = tree_hash(tree)
    (tree / "a/__pycache__").mkdir()
    (tree / "a/__pycache__/b.pyc").write_bytes(b"1")
    (tree / "d.txt").chmod(0o600)
    (tree / "empty").mkdir()
    assert tree_hash(tree) == before


def test_a_choice_of_files_hashes_like_a_tree_of_just_them(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "d.txt").write_text("d.txt")
    assert tree_hash(tree, ["d.txt"]) == tree_hash(other)
    assert tree_hash(tree, reversed(tree_files(tree))) == current_tree_hash(tree) == tree_hash(tree)
    assert current_tree_hash(other / "nothing") is None
