"""Secrets end to end: they reach the program, and nothing else."""

import base64
import json
import threading
from pathlib import Path

import psutil
import pytest
from google.oauth2.credentials import Credentials

from controller.core.clock import Clock
from controller.core.errors import ConfigError
from controller.gcp.client import GoogleClient
from controller.inputs.secrets import Vault
from tests.controller.conftest import SlipwayCli
from tests.controller.localcloud.harness import EmulatedCloud

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
