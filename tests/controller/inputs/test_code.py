"""What is shipped, and how it arrives; and secrets, which reach the program and nothing else."""

import base64
import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import psutil
import pytest
from google.oauth2.credentials import Credentials

from conf.schema.config import Config
from controller.agent.commands.run_inputs import unpack
from controller.agent.fs import AgentError, tree_hash
from controller.core.errors import ConfigError
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.inputs import code
from controller.inputs.code import CodeSnapshot, take_snapshot
from controller.inputs.definitions import DefinitionError, find_signature
from controller.inputs.env_inputs import Vault
from controller.inputs.modules import module_files, taken_names
from controller.sweep.definition import JobBuilder
from tests.composed import config_of
from tests.composed import config_of as compose_config
from tests.controller.conftest import SlipwayCli
from tests.controller.inputs.wheels import git, git_repository, write
from tests.controller.localcloud.harness import EmulatedCloud


def shipped(tmp_path: Path, *overrides: str, folder: str = "r") -> CodeSnapshot:
    """What a run whose config has these overrides ships from a folder."""
    words = ["cloud=local", "program=command", "program.command=[echo]", f"run.state_dir={tmp_path}/state"]
    return take_snapshot(config_of(*words, *overrides), tmp_path / folder)


def test_secrets_and_what_is_excluded_stay_here(tmp_path: Path) -> None:
    """And the state folder, which may lie in the repository and changes while it is shipped."""
    files = {"train.py": "", ".env": "TOKEN=1", "sub/.env.local": "", "key.pem": "", "data/big.bin": "", "data.py": ""}
    git_repository(tmp_path / "r", {**files, "home/runs/r/events.jsonl": ""})
    (tmp_path / "r" / "new.py").write_text("")
    inside = f"run.state_dir={tmp_path}/r/home"
    assert shipped(tmp_path, inside).files == ("data.py", "data/big.bin", "new.py", "train.py")
    own = (".env", "data.py", "key.pem", "new.py", "sub/.env.local", "train.py")
    assert shipped(tmp_path, inside, "code.exclude=[data/]").files == own


def test_too_much_names_the_largest(tmp_path: Path) -> None:
    git_repository(tmp_path / "r", {"train.py": "", "weights.bin": "w" * 2_000_000})
    with pytest.raises(ConfigError, match=r"code\.max_mb: 2\.0 MB .* largest: weights\.bin \(2\.0 MB\).*code\.exclude"):
        shipped(tmp_path, "code.max_mb=1")


def test_links_arrive_as_links(tmp_path: Path) -> None:
    """So that Python finds the neighbours of the file that a link leads to."""
    git_repository(tmp_path / "r", {"lib/train.py": "import near", "lib/near.py": "", "bin/keep": ""})
    (tmp_path / "r/bin/train.py").symlink_to(tmp_path / "r/lib/train.py")
    (tmp_path / "r/vendor").symlink_to("lib")
    found = shipped(tmp_path)
    assert dict(found.links) == {"bin/train.py": "../lib/train.py", "vendor": "lib"}
    assert (found.size, len(found.paths)) == ("5 files", 3)
    (tmp_path / "archive").write_bytes(found.archive)
    unpack(tmp_path / "archive", tmp_path / "tree")
    assert tree_hash(tmp_path / "tree") == found.sha256
    assert (tmp_path / "tree/vendor/near.py").is_file()
    command = [sys.executable, str(tmp_path / "tree/bin/train.py")]
    assert subprocess.run(command, check=False).returncode == 0
    (tmp_path / "r/vendor").unlink()
    (tmp_path / "r/vendor").symlink_to("bin")
    assert shipped(tmp_path).sha256 != found.sha256, "another link is other code"


@pytest.mark.parametrize(
    "links",
    [
        {"a": "../out"},
        {"a": "/etc"},
        {"sub/a": "../../out"},
        {"a": "b", "b": ".."},
        {"a": "..", "a/x": "y"},
        {"a": "b/../out", "b": "."},
    ],
    ids=str,
)
def test_an_archive_whose_links_lead_outside_is_refused(tmp_path: Path, links: dict[str, str]) -> None:
    with tarfile.open(tmp_path / "archive", "w") as tar:
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    with pytest.raises(AgentError, match="leads outside it"):
        unpack(tmp_path / "archive", tmp_path / "tree")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "tree"]


def test_what_is_left_out_is_counted_and_more_files_than_workers_take_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git_repository(tmp_path / "r", {"train.py": "", "a.pem": "", ".gitignore": "out/\n", "out/x": ""})
    git(tmp_path / "r", "rm", "--quiet", "--cached", "out/x")
    found = shipped(tmp_path)
    assert (found.size, found.left_out) == ("2 files, 2 left out", {"a.pem": "code.exclude", "out/": "ignored by git"})
    assert found.unexpected == {}
    (tmp_path / "r/link").symlink_to("train.py")
    monkeypatch.setattr(code, "MAX_FILES", 2)
    with pytest.raises(ConfigError, match=r"code\.exclude: 3 files of code are more than the 2 that workers unpack"):
        shipped(tmp_path)


def test_another_repository_is_shipped_at_its_commit_and_cloned_once(tmp_path: Path) -> None:
    first = git_repository(tmp_path / "r", {"train.py": "first"})
    (tmp_path / "r" / "train.py").write_text("second")
    git(tmp_path / "r", "commit", "--quiet", "--all", "--message=two")
    words = f"code.repository={{url: {tmp_path}/r, commit: {first}}}"
    found = shipped(tmp_path, words, folder="")
    assert found.files == ("train.py",)
    assert (found.root / "train.py").read_text() == "first"
    (tmp_path / "r").rename(tmp_path / "gone")
    (found.root / "made.txt").write_text("by a build")
    assert shipped(tmp_path, words, folder="").sha256 == found.sha256


def quickstart(tmp_path: Path, *overrides: str) -> Config:
    return compose_config("+experiment=quickstart", f"run.state_dir={tmp_path}/state", *overrides)


REWARD = r"loop.rewards={my_rewards\:brief: 1.0}"


def test_modules_are_shipped_beside_the_trainer_and_identify_the_run(tmp_path: Path) -> None:
    write(tmp_path / "slipway", {"my_rewards.py": "def brief(response, answer): return 1", "lab/tools.py": ""})
    write(tmp_path / "slipway", {"lab/__init__.py": "", "__pycache__/old.py": "", ".hidden/x.py": "", "notes.md": ""})
    without = take_snapshot(quickstart(tmp_path), tmp_path)
    assert without.sha256 == take_snapshot(quickstart(tmp_path), tmp_path / "slipway").sha256
    found = take_snapshot(quickstart(tmp_path, REWARD), tmp_path)
    own = [name for name in found.paths if name.startswith("modules/")]
    assert own == ["modules/lab/__init__.py", "modules/lab/tools.py", "modules/my_rewards.py"]
    assert set(found.paths) - {*own} == set(without.paths)
    assert found.sha256 != without.sha256
    (tmp_path / "archive").write_bytes(found.archive)
    unpack(tmp_path / "archive", tmp_path / "tree")
    assert tree_hash(tmp_path / "tree") == found.sha256
    write(tmp_path / "slipway", {"my_rewards.py": "def brief(response, answer): return 2"})
    assert take_snapshot(quickstart(tmp_path, REWARD), tmp_path).sha256 != found.sha256
    builder = JobBuilder(tmp_path)
    plans = (builder.build_plan(config) for config in (quickstart(tmp_path), quickstart(tmp_path, REWARD)))
    shares = ["modules/my_rewards.py" in plan.snapshot.paths for plan in plans]
    assert shares == [False, True], "runs of a sweep share code only with the same modules"


def test_modules_behind_links_are_shipped_as_files(tmp_path: Path) -> None:
    write(tmp_path, {"shared/lab/tools.py": "", "shared/brief.py": "def brief(response, answer): return 1"})
    (tmp_path / "slipway").mkdir()
    (tmp_path / "slipway/lab").symlink_to("../shared/lab")
    (tmp_path / "slipway/my_rewards.py").symlink_to("../shared/brief.py")
    (tmp_path / "shared/lab/circle").symlink_to("..")
    found = take_snapshot(quickstart(tmp_path, REWARD), tmp_path)
    assert [name for name in found.paths if "modules/" in name] == ["modules/lab/tools.py", "modules/my_rewards.py"]
    (tmp_path / "archive").write_bytes(found.archive)
    unpack(tmp_path / "archive", tmp_path / "tree")
    assert tree_hash(tmp_path / "tree") == found.sha256


def test_other_folders_may_hold_them(tmp_path: Path) -> None:
    write(tmp_path, {"src/lab/rewards.py": "", "slipway/mine.py": ""})
    both = quickstart(tmp_path, "code.modules=[slipway, src]", "code.exclude=[mine.py]")
    assert list(module_files(both, tmp_path)) == ["lab/rewards.py"]
    with pytest.raises(ConfigError, match=r"code\.modules: there is no folder .*/nowhere; set the folders"):
        module_files(quickstart(tmp_path, "code.modules=[nowhere]"), tmp_path)
    write(tmp_path, {"src/mine.py": "", "slipway/mine.py": ""})
    with pytest.raises(ConfigError, match=r"code\.modules: .* would be the same module; rename one"):
        module_files(quickstart(tmp_path, "code.modules=[slipway, src]"), tmp_path)


SOURCE = """
import math
from functools import partial as bound
try:
    import fast
except ImportError:
    fast = None
LIMIT: int = 3
first, second = 1, 2
def plain(response, answer): ...
def full(a, /, b, c=1, *rest, d, e=2, **more): ...
@bound
def decorated(response): ...
class Thing: ...
if LIMIT:
    def conditional(x): ...
"""


def test_what_a_module_defines_is_read_from_its_syntax(tmp_path: Path) -> None:
    write(tmp_path, {"mine.py": SOURCE, "star.py": "from os import *", "broken.py": "def f(:\n", "null.py": "\0"})
    write(tmp_path, {"pkg/__init__.py": "from .inner import helper", "pkg/inner.py": "def helper(x): ..."})
    files = {path.relative_to(tmp_path).as_posix(): path for path in sorted(tmp_path.rglob("*.py"))}

    def find(reference: str, *, installed: bool = False) -> str | None:
        found = find_signature(reference, files, installed=installed)
        return None if found is None else str(found)

    assert find("mine:plain") == "(response, answer)"
    assert find("mine:full") == "(a, /, b, c=…, *rest, d, e=…, **more)"
    assert find("pkg.inner:helper") == "(x)"
    names = ("math", "bound", "fast", "LIMIT", "second", "decorated", "Thing", "conditional")
    assert [find(f"mine:{name}") for name in names] == [None] * len(names)
    assert find("star:anything") is None
    assert find("pkg:helper") == "(x)"
    assert find("trainer.rewards.functions:boxed") == "(response, answer)"
    assert (find("optax:scale_by_lion") or "").startswith("(b1=…, b2=…")
    assert find("statistics:fmean") is not None
    for reference, message in {
        "mine:plian": r"mine\.py defines no plian; it defines plain, full, decorated, Thing",
        "broken:f": r"broken\.py, line 1: ",
        "null:f": r"null\.py",
        "nowhere:f": r"no module nowhere in the folders of code\.modules, which are shipped; modules there: broken, mi",
        "pytest:raises": r"no module pytest in the folders",
        "statistics:fmeen": r"statistics\.py defines no fmeen",
    }.items():
        with pytest.raises(DefinitionError, match=message):
            find(reference)
    assert find("pytest:raises", installed=True) is None
    with pytest.raises(DefinitionError, match="no package nowhere is installed"):
        find("nowhere:f", installed=True)


def test_a_name_that_is_taken_is_said(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("random.py", "optax/__init__.py", "trainer.py", "mine.py")}
    taken = {"random.py": "Python's standard library", "__init__.py": "the package optax", "trainer.py": "Slipway"}
    assert {path.name: owner for path, owner in taken_names(files)} == taken


PLANTED = "hf_planted0123456789"
ONE = "tpu.accelerator_type=v5litepod-4"
KEEP = "cleanup.on_success=keep"


def opened(sources: dict[str, str | None], environment: dict[str, str]) -> Vault:
    vault = Vault(sources, environment)
    vault.load(GoogleClient(None, Clock()))
    return vault


def test_where_secrets_come_from(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("from a file\n")
    (tmp_path / "netrc").write_text("machine a password b\n")
    sources = {"A": "env", "B": "env:OTHER", "C": f"file:{tmp_path}/key", "D": None, "E": "env", "NETRC": "env"}
    vault = opened(sources, {"A": "a", "OTHER": "b", "D": "d", "NETRC": f"{tmp_path}/netrc"})
    assert vault.names == ["A", "B", "C", "NETRC"]
    assert vault.values() == {"A": "a", "B": "b", "C": "from a file", "NETRC": "machine a password b\n"}
    assert "from a file" not in f"{vault} {vault!r}"
    assert Vault({"NETRC": "env"}, {"NETRC": "/nowhere"}).names == []
    for source, words in {"env:X": "environment variable X is not set", "file:/no": "cannot read /no: "}.items():
        with pytest.raises(ConfigError, match=rf"env\.secrets\.A: {words}"):
            opened({"A": source}, {})


def grep(folder: Path, word: str) -> list[Path]:
    return [p for p in folder.rglob("*") if not p.is_symlink() and word.encode() in content(p)]


def content(file: Path) -> bytes:
    """Of a file that may be renamed away while others are read."""
    try:
        return file.read_bytes() if file.is_file() else b""
    except FileNotFoundError:
        return b""


@pytest.mark.e2e
def test_a_planted_secret_is_found_nowhere_but_in_its_file(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    (tmp_path / "netrc").write_text("machine example.com login me password planted_password\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    body = "echo token $HF_TOKEN; cat $NETRC; echo $HF_TOKEN > ../token; while [ ! -e ../go ]; do sleep 0.05; done"
    words = ["up", ONE, KEEP, f'program.command=[sh,-c,"{body}"]', 'program.setup=[[sh,-c,"echo setup $HF_TOKEN"]]']
    out = slipway("plan", *words[1:], "--json")[1]
    assert PLANTED not in out
    assert "secrets HF_TOKEN, NETRC" in out
    seen, lines = list[Path](), list[str]()

    def look() -> None:
        """While it runs: the files that hold the secret, and every argument list of the machine."""
        homes = slipway.home / "localcloud" / "nodes"
        while not (tokens := list(homes.glob("*/worker-0/home/.slipway/runs/*/token"))) or not tokens[0].read_text():
            threading.Event().wait(0.05)
        try:
            seen.extend(p for p in grep(slipway.home, PLANTED) if p != tokens[0])
            lines.extend(" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))
            tokens[0].unlink()
        finally:  # whatever was found, the program must end
            (tokens[0].parent / "go").touch()

    looking = threading.Thread(target=look)
    looking.start()
    code, out, err = slipway(*words)
    looking.join()
    assert (code, err) == (0, "")
    assert f"token {'*' * len(PLANTED)}" in out
    assert sorted(p.name for p in seen) in (["secrets"], ["log", "secrets"])  # the log is masked later
    assert not [line for line in lines if PLANTED in line]
    assert grep(slipway.home, PLANTED) == grep(slipway.home, "planted_password") == []
    cloud = slipway.cloud()
    assert PLANTED not in json.dumps([cloud.requests(), cloud.get("state")])
    out = slipway("logs", *words[1:])[1]
    assert f"token {'*' * len(PLANTED)}" in out
    monkeypatch.setenv("HF_TOKEN", "another one")
    assert slipway(*words)[1].count("has already finished") == 1  # it is no part of a run's identity


@pytest.mark.e2e
def test_secret_manager(slipway: SlipwayCli) -> None:
    cloud = slipway.cloud()
    EmulatedCloud(cloud.state).establish()
    google = GoogleClient(Credentials(token=cloud.token), Clock(), cloud.roots)
    parent, secrets = "projects/slipway-local", "projects.secrets"
    google.call("secretmanager", f"{secrets}.create", parent=parent, secretId="key", body={})
    for value in ("first value", PLANTED):
        payload = {"payload": {"data": base64.b64encode(value.encode()).decode()}}
        google.call("secretmanager", f"{secrets}.addVersion", parent=f"{parent}/secrets/key", body=payload)
    google.close()
    words = ["up", ONE, 'program.command=[sh,-c,"printf %s $KEY | wc -c"]']
    code, out, err = slipway(*words, f"env.secrets.KEY=secretmanager:{parent}/secrets/key")
    assert (code, err) == (0, "")
    assert f" {len(PLANTED)}\n" in out
    assert slipway.cloud().get("state")["service"]["secretmanager.googleapis.com"]["state"] == "ENABLED"
    assert base64.b64encode(PLANTED.encode()).decode() not in json.dumps([cloud.requests(), cloud.get("state")])
    before = len(slipway.mutations())
    for name, version in (("other", "other/versions/latest"), ("key/versions/9", "key/versions/9")):
        code, _, err = slipway(*words, "run.name=other", f"env.secrets.KEY=secretmanager:{parent}/secrets/{name}")
        assert code == 2
        assert f"env.secrets.KEY: {parent}/secrets/{version} does not exist" in err
    assert not [m for m in slipway.mutations()[before:] if "/nodes" in m or "/queuedResources" in m]
