"""What docs/security.md claims of the source, files, sockets, Hydra and whole runs; each of its claims names a test."""

import ast
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
import yaml
from google.oauth2.credentials import Credentials

from conf.schema.topology import YamlLoader
from controller.cleanup.orphans import BilledItem
from controller.cli import main
from controller.cli.verbs.billed import format_items
from controller.config.compose import compose
from controller.connect import _state_folder
from controller.core.errors import ConfigError
from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.localcloud import lifecycle
from controller.records import index
from tests.controller.conftest import SlipwayCli
from tests.hostile import CANARY, HOSTILE_STRINGS, TOUCH_COMMAND
from tests.paths import ROOT
from tests.virtual_time import IN_VIRTUAL_TIME

PACKAGES = ("conf", "controller", "hydra_plugins", "trainer")
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash", "cmd"}
SPEAK_SHELL = {
    "controller/here.py": "what a worker's shell gets over SSH",
    "controller/inputs/program_words.py": "a constant with the folder and the program as its arguments",
    "controller/agent/commands/observe.py": "as root, a constant with the path as $0",
    "controller/ssh/worker_connection.py": "the ProxyCommand of the user's own ~/.ssh/config, as ssh does",
    "trainer/environments/verifiers_box.py": "constants with paths and the command as their arguments, in a box",
    "trainer/evaluation/programs.py": "a constant with a path as $0, in a box",
    "controller/localcloud/vms/sessions.py": "as sshd gives what a client sends to the shell of the user",
}
DANGEROUS_CALLS = {"eval", "exec", "os.system", "os.popen", "tempfile.mktemp", "yaml.unsafe_load", "yaml.full_load"}
DANGEROUS_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "torch", "telnetlib"}

ONE = "tpu.accelerator_type=v5litepod-4"
REFUSED = ("\0", "\ud800", "${", "{assets", "é" * 1000)
CARRIED = [text for text in HOSTILE_STRINGS if not any(part in text for part in REFUSED)]
"""What is not refused; OmegaConf has a meaning of its own for the dollar with a brace."""
GOT = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('got.json', 'w'))"
PLANTED = "planted_0123456789"
PASSWORD = "planted_password"


@pytest.fixture(scope="module")
def nodes() -> list[tuple[str, ast.AST]]:
    """Every node of the source that these tests look at, with the file that it is in."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    kinds = ast.Import | ast.ImportFrom | ast.Call | ast.List | ast.Tuple
    trees = ((path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in files)
    return [(name, node) for name, tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]


def test_nothing_is_evaluated_and_nothing_unpickled(nodes: list[tuple[str, ast.AST]]) -> None:
    found = []
    for name, node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [(name, m) for m in modules if m.partition(".")[0] in DANGEROUS_MODULES]
        if isinstance(node, ast.Call):
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
            called = ast.unparse(node.func)
            unsafe = called == "yaml.load" and words.get("Loader") not in SAFE_LOADERS
            wrong = called in DANGEROUS_CALLS or words.get("shell") == "True" or "allow_pickle" in words
            found += [(name, ast.unparse(node))] if unsafe or wrong else []
    assert found == [("trainer/tokenizer/training.py", "pickle")]  # an Unpickler that refuses every name: test_training
    assert issubclass(YamlLoader, yaml.SafeLoader | getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def test_certificates_are_checked_everywhere() -> None:
    """Nothing switches that off, and Google's APIs are asked over TLS."""
    off = re.compile(r"\bverify ?=|CERT_NONE|check_hostname|disable_ssl_certificate|_create_unverified|--insecure")
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert [path.name for path in files if off.search(path.read_text())] == []
    client = GoogleClient(Credentials(token="t"), Clock())
    roots = {api: client.root(api) for api in ("tpu", "compute", "storage", "iam", "secretmanager")}
    client.close()
    assert roots == {api: f"https://{api}.googleapis.com/" for api in roots}


SAFE_LOADERS = {"YamlLoader", "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)", "yaml.SafeLoader", "yaml.CSafeLoader"}


def test_shells_are_spoken_to_in_few_places(nodes: list[tuple[str, ast.AST]]) -> None:
    lists = [(name, node.elts[0]) for name, node in nodes if isinstance(node, ast.List | ast.Tuple) and node.elts]
    found = {name for name, word in lists if isinstance(word, ast.Constant) and word.value in SHELLS}
    assert found == set(SPEAK_SHELL)


def test_packages_of_the_pod_are_pinned_with_hashes(nodes: list[tuple[str, ast.AST]]) -> None:
    pins = re.split(r"\n(?=\S)", re.sub(r"(?m)^\s*#.*\n?", "", (ROOT / "conf/requirements.txt").read_text()).strip())
    assert len(pins) > 50
    assert [
        pin for pin in pins if not re.match(r"[a-z0-9._-]+(\[.*\])?==\S+", pin, re.I) or "--hash=sha256:" not in pin
    ] == []
    lists = [
        (name, ast.unparse(node)) for name, node in nodes if isinstance(node, ast.List | ast.Call) and says_pip(node)
    ]
    unhashed = [(name, text) for name, text in lists if INSTALL.search(text) and "--require-hashes" not in text]
    assert [(name, text[:60]) for name, text in unhashed] == [
        ("controller/agent/commands/venv.py", "[uv(), 'pip', 'install', '--quiet', f'--python={folder}/bin/"),
        ("controller/inputs/own_program.py", "['uv', 'pip', 'install', '-e', f'./{place}' if inside else '"),
    ], "of a requirements file or a project of the user's, who may have hashes in it"


def says_pip(node: ast.List | ast.Call) -> bool:
    """Return whether one of its items is the word, which is faster than to write the node out."""
    words = node.elts if isinstance(node, ast.List) else node.args
    return any(isinstance(word, ast.Constant) and word.value == "pip" for word in words)


INSTALL = re.compile(r"'pip', '(install|sync)'")


@pytest.mark.parametrize(
    "text",
    [
        f'program: {{command: !!python/object/apply:os.system ["{TOUCH_COMMAND}"]}}',
        f'program: !!python/object/apply:subprocess.check_output [["touch", "{CANARY}"]]',
        f"program: {{_target_: os.system, command: ['{TOUCH_COMMAND}']}}",
        f"_target_: os.system\ncommand: {TOUCH_COMMAND}",
        f"env: {{vars: {{A: {{_target_: os.system, command: '{TOUCH_COMMAND}'}}}}}}",
        f"run: {{name: '${{os.system:{TOUCH_COMMAND}}}'}}",
        "defaults: [{override /hydra/launcher: submitit}]",
    ],
)
def test_a_file_of_the_user_makes_no_object(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "slipway/experiment").mkdir(parents=True)
    (folder / "own.yaml").write_text(f"# @package _global_\n{text}\n")
    monkeypatch.chdir(tmp_path)
    assert main.run(["plan", "+experiment=own", "cloud=local", "program=command"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [*tmp_path.rglob(CANARY)] == []


@pytest.mark.parametrize("name", ["a, b] it's {a: b} #x", "q'\\' back\\", 'é ü\n"'])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    (folder := tmp_path / name / "slipway/experiment").mkdir(parents=True)
    (folder / "own.yaml").write_text("# @package _global_\nrun: {name: from-there}\n")
    words = ["+experiment=own", "cloud=local", "program=command", "program.command=[a]"]
    config, problems = compose(words, extra_dir=tmp_path / name / "slipway")
    assert problems == []
    assert config is not None
    assert config.run.name == "from-there"


def test_a_state_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    words = ["cloud=local", "program=command", "program.command=[a]"]
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    config, _ = compose([*words, f"run.state_dir={tmp_path}/shared"])
    assert config is not None
    with pytest.raises(ConfigError, match=r"run\.state_dir: .*is writable by others"):
        _state_folder(config)
    config, _ = compose([*words, f"run.state_dir={tmp_path}/new"])
    assert config is not None
    assert _state_folder(config).stat().st_mode & 0o777 == 0o700


@pytest.mark.e2e
def test_files_are_private_and_sockets_on_loopback(slipway: SlipwayCli) -> None:
    """With a umask that would let everybody in, while a program runs."""
    words = ["cleanup.idle_minutes=60", "tpu.accelerator_type=v5litepod-4", "program.command=[sleep,infinity]"]
    slipway.cloud()  # awake: another process would start it with a new interpreter
    argv = [*IN_VIRTUAL_TIME, "up", "--detach", *words, *slipway.base_overrides, "env.packages=none"]
    environment = {**os.environ, "SLIPWAY_HOME": str(slipway.home), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, env=environment, umask=0, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    paths = [slipway.home, *slipway.home.rglob("*")]
    # the program's own, in a 0700 folder
    work = [path for path in paths if "work" in path.relative_to(slipway.home).parts]
    assert all(path.lstat().st_mode & 0o077 == 0 for path in work[:1])
    public = [p for p in paths if p not in work and not p.is_symlink() and p.lstat().st_mode & 0o077]
    assert [str(path.relative_to(slipway.home)) for path in public] == []
    server = psutil.Process(json.loads((slipway.home / "localcloud/endpoint.json").read_text())["pid"])
    listening = [c.laddr.ip for c in server.net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening
    assert all(ip.startswith("127.") for ip in listening)
    ours = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if (process.info["environ"] or {}).get("SLIPWAY_LOCALCLOUD_WORKER", "").startswith(str(slipway.home))
    ]
    open_ports = [c for process in ours for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
    assert open_ports == [], "the agent takes orders over SSH alone"
    assert any("sleep" in " ".join(process.info["cmdline"] or []) for process in ours)


def experiment(slipway: SlipwayCli, content: dict) -> str:
    """The user's own file, for what Hydra's command line has no words for."""
    folder = slipway.repository / "slipway" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content, default_style='"'))
    return "+experiment=own"


@pytest.mark.e2e
def test_nothing_of_a_config_meets_a_shell(
    slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slipway.home = tmp_path / f"-rf ;{TOUCH_COMMAND} $({TOUCH_COMMAND})`{TOUCH_COMMAND}`'\" [a] é\n{TOUCH_COMMAND}"
    slipway.packages = "none"
    monkeypatch.setenv("SLIPWAY_HOME", str(slipway.home))
    (slipway.repository / f"$({TOUCH_COMMAND});.py").write_text("")
    (slipway.repository / "-rf").write_text("")
    variables = {f"V{number}": text for number, text in enumerate(CARRIED)}
    command = ["python3", "-c", GOT, *CARRIED]
    content = {
        "program": {"command": command, "setup": [["true", text] for text in CARRIED[:9]]},
        "env": {"vars": variables},
    }
    code, out, err = slipway("up", ONE, "cleanup.on_success=keep", "program=command", experiment(slipway, content))
    assert code == 0, out
    assert [line for line in err.splitlines() if "looks like a password" not in line] == []
    [got] = slipway.home.glob("localcloud/nodes/*/worker-0/home/.slipway/runs/*/work/got.json")
    words, environment = json.loads(got.read_text())
    bucket = "gs://slipway-local-slipway-us-central1"
    assert words == [text.replace("{bucket}", bucket) for text in CARRIED]
    assert {name: environment[name] for name in variables} == {
        name: text.replace("{bucket}", bucket) for name, text in variables.items()
    }
    assert (got.parent / "-rf").exists()
    exports = lifecycle.format_exports(slipway.home / "localcloud")
    shell = ["/bin/sh", "-c", f'{exports}\nprintf %s "$CLOUDSDK_CONFIG"']
    shown = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown == str(slipway.home / "localcloud/gcloud")
    assert [path for path in [*tmp_path.rglob("*"), *Path.cwd().iterdir()] if path.name == CANARY] == []


def test_words_for_a_shell_are_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the messages that repeat a command; `exec` and `ssh` are tried on workers."""
    texts = tuple(text for text in CARRIED if len(text) < 1000)
    monkeypatch.setattr(index, "load_last_command", lambda folder: index.LastCommand(texts))
    main.with_recalled(main.parse(["status"]))
    recalled = capsys.readouterr().err.removeprefix("last run of this folder: ").removesuffix("\n")
    orphan = BilledItem("TPU", "pod", "us-east5-b", None, "", "no run uses it")
    [orphans] = [line for line in format_items([orphan], "p", texts) if line.endswith("` deletes them")]
    words = orphans.removeprefix("`slipway orphans --delete ").removesuffix("` deletes them")
    for printed in (recalled, words):
        argv = ["/bin/sh", "-c", f"printf '%s\\0' {printed}"]
        shown = subprocess.run(argv, cwd=tmp_path, capture_output=True, check=True).stdout
        assert shown.split(b"\0") == [*(text.encode() for text in texts), b""]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.deep
@pytest.mark.e2e
def test_a_failing_run_tells_no_secret(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its setup fails first, then its program, with the secrets in what they print and raise."""
    (tmp_path / "netrc").write_text(f"machine example.com login me password {PASSWORD}\n")
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    says = "import os, sys, time; print(os.environ['HF_TOKEN']); sys.stderr.write(open(os.environ['NETRC']).read())"
    wait = f"while not os.path.exists({str(tmp_path / 'looked')!r}): time.sleep(0.02)"
    fails = f"{says}\n{wait}\nraise RuntimeError(os.environ['HF_TOKEN'] + {PASSWORD[:8]!r} + {PASSWORD[8:]!r})"
    lines: list[str] = []
    holders: list[dict[str, str]] = []
    ended = threading.Event()

    def look() -> None:
        """Every argument list of the machine, and the environments of the workers' processes."""
        while not ended.wait(0.02):
            for process in psutil.process_iter(["cmdline", "environ"]):
                lines.append(" ".join(process.info["cmdline"] or []))
                environ = process.info["environ"] or {}
                if "SLIPWAY_LOCALCLOUD_WORKER" in environ and PLANTED in environ.values():
                    holders.append(environ)
                    (tmp_path / "looked").touch()

    looking = threading.Thread(target=look)
    looking.start()
    said = ""
    try:
        for part in ("setup", "command"):
            program = {
                "command": ["python3", "-c", fails],
                "setup": [["python3", "-c", fails]] if part == "setup" else [],
            }
            code, out, err = slipway(
                "up", ONE, "recovery.max_program_failures=0", "recovery.max_without_progress=1", "program=command",
                experiment(slipway, {"program": program}),
            )  # fmt: skip
            said += out + err
            assert code != 0, part
    finally:
        ended.set()
        looking.join()
    slipway("logs", ONE, "program=command", "+experiment=own")
    slipway("status", ONE, "program=command", "+experiment=own")
    assert "RuntimeError" in said
    assert "*" * len(PLANTED) in said
    cloud = slipway.cloud()
    known = json.dumps([cloud.requests(), cloud.get("state")])
    for secret in (PLANTED, PASSWORD):
        assert secret not in said
        assert secret not in known
        assert not [line for line in lines if secret in line]
        files = [path for path in slipway.home.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert holders
    assert all("SLIPWAY_RUN_ID" in environ for environ in holders), "only what the run started"
    assert PLANTED in os.environ.values()
