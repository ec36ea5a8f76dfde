"""The SSH config means what it means to ssh; where there is no ssh, what would mean something else is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.ssh.ssh_config import HostConfig, parse_hop

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
HOST = "10.128.0.5"
POD = "Host 10.*\n  ProxyJump gw.example.com\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that is not the one of this account."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh/config.d").mkdir(parents=True)
    return tmp_path


def write(home: Path, text: str | bytes) -> Path:
    (home / ".ssh/config").write_bytes(text.encode() if isinstance(text, str) else text)
    return home / ".ssh/config"


def of(options: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    """The options that decide how to connect, and of the others the wanted ones."""
    keys = {*wanted, "proxyjump", "proxycommand", "identityfile"}
    return {key: value for key, value in options.items() if key in keys}


PLAIN: list[tuple[str | bytes, dict[str, Any]]] = [
    ("", {"port": "22"}),
    (POD, {"proxyjump": "gw.example.com"}),
    (b"# caf\xe9\nHost 10.*\n  Port 2200\n", {"port": "2200"}),
    ("Host * !10.*\n  ProxyJump a\nHost 10.*\n  ProxyJump=b,me@c:2222\n", {"proxyjump": "b,me@c:2222"}),
    ("Host 10.*\n  ProxyJump none\nHost *\n  ProxyCommand nc %h %p\n", {}),
    ("Host *\n  ProxyCommand none\nMatch all\n  ProxyJump a\n", {}),
    ("Host *\n  ProxyCommand nc -X 5 %h %p\n  ProxyJump a\n", {"proxycommand": f"nc -X 5 {HOST} 22"}),
    ("Host *\n  HostName %h.internal\n  ServerAliveInterval 5\n", {"hostname": f"{HOST}.internal"}),
    ("Host *\n  IdentityFile none\n  Include config.d/*.conf\n", {"identityfile": []}),
    ("IdentityFile /one\nHost *\n  IdentityFile /two-%h\n", {"identityfile": ["/one", f"/two-{HOST}"]}),
]


@needs_ssh
@pytest.mark.parametrize(("text", "wanted"), PLAIN)
def test_a_plain_config_means_the_same_with_ssh_and_without(
    text: str | bytes, wanted: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(home, text)
    for config in (None, file):
        assert of(HostConfig(config, "slipway").lookup(HOST), wanted) == wanted
    monkeypatch.setenv("PATH", str(home))
    assert of({"port": "22", **HostConfig(file, "slipway").lookup(HOST)}, wanted) == wanted


ONLY_SSH: dict[str, tuple[str, dict[str, Any]]] = {
    "home": ("Include ~/.ssh/config.d/*\nHost *\n  Port 2200\n", {"port": "2200", "proxyjump": "gw.example.com"}),
    "relative": ("Host 10.*\n  Include config.d/pods\n", {"proxyjump": "gw.example.com"}),
    "quotes": ('Include "~/.ssh/config.d/none" "~/.ssh/config.d/pods"\n', {"proxyjump": "gw.example.com"}),
    "equals": ("include=config.d/none config.d/pods\n", {"proxyjump": "gw.example.com"}),
    "user": ("Match user root\n  Port 1\nMatch user slipway\n  Port 2\n", {"port": "2"}),
    "host": (f"Match host=10.* originalhost {HOST}\n  Port 3\n", {"port": "3"}),
    "final": ("Match final all\n  Port 4\nHost *\n  User x\n", {"port": "4"}),
    "exec": (f"Match exec \"test %h = {HOST}\"\n  Port 5\nMatch exec false\n  ProxyJump no\n", {"port": "5"}),
    "comment": ("Host *\n  ProxyJump gw # note\n", {"proxyjump": "gw"}),
    "service": ("Host *\n  Port ssh\n", {"port": "22"}),
    "tokens": ("Host *\n  ProxyCommand nc %n:%p %r 100%%\n", {"proxycommand": f"nc {HOST}:22 slipway 100%"}),
    "variable": ("Host *\n  IdentityFile ${LEVEL}/%n-%r\n", {"identityfile": [f"/keys/{HOST}-slipway"]}),
    "canonical": ("CanonicalizeHostname always\nMatch canonical\n  Port 6\n", {"port": "6"}),
}  # fmt: skip


@needs_ssh
@pytest.mark.parametrize(("text", "wanted"), ONLY_SSH.values(), ids=ONLY_SSH)
def test_what_only_ssh_understands_is_read_by_ssh(
    text: str, wanted: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEVEL", "/keys")
    (home / ".ssh/config.d/pods").write_text(POD)
    file = write(home, text)
    found = HostConfig(None, "slipway").lookup(HOST)
    assert of(found, wanted) == wanted
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(ConfigError, match=rf"^{file}, line \d: .*; only OpenSSH reads that, and no `ssh` works"):
        HostConfig(None, "slipway").lookup(HOST)


@needs_ssh
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host *\n  ProxyJmup gw\n", r"config: line 2: Bad configuration option: proxyjmup"),
        ("Host other\n  Port 1x\n", r"config line 2: Bad port '1x'"),
        ("Host *\n  Match\n", r"config line 2"),
        ("Host *\n  ProxyCommand nc %Z\n", r"proxycommand nc %Z: Slipway does not know %Z"),
        ("Host *\n  IdentityFile ${NOT_SET}/key\n", r"does not know \$\{NOT_SET\}"),
        (
            "Host *\n  ProxyCommand nc\n  ProxyUseFdpass yes\n",
            r"SSH config of .*: Slipway cannot do `ProxyUseFdpass yes`",
        ),
    ],
)
def test_what_ssh_refuses_is_told_with_file_and_line(text: str, words: str, home: Path) -> None:
    file = write(home, text)
    for config in (HostConfig(None), HostConfig(file)):
        with pytest.raises(ConfigError, match=words) as caught:
            config.lookup(HOST)
        assert words.startswith(("proxy", "does", "SSH")) or str(file) in str(caught.value)


@needs_ssh
def test_a_file_that_is_missing_or_a_command_that_never_ends_is_told(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"Can't open user config file .*nowhere"):
        HostConfig(home / "nowhere").lookup(HOST)
    with monkeypatch.context() as without_ssh:
        without_ssh.setenv("PATH", str(home))
        assert HostConfig(None).lookup(HOST)["hostname"] == HOST
        with pytest.raises(ConfigError, match=r"cannot read the SSH config .*nowhere: No such file"):
            HostConfig(home / "nowhere").lookup(HOST)
    monkeypatch.setattr("controller.ssh.ssh_config.SECONDS", 0.2)
    write(home, 'Match exec "exec sleep 60"\n  Port 1\n')
    with pytest.raises(ConfigError, match=r"did not end within 0\.2 s; does a `Match exec`"):
        HostConfig(None).lookup(HOST)


@needs_ssh
def test_a_command_of_the_config_runs_once_for_each_host(home: Path) -> None:
    config = HostConfig(write(home, f'Match exec "echo %h >> {home}/asked"\n  Port 2\n'))
    for _ in range(2):
        assert config.lookup(HOST)["port"] == config.lookup("other")["port"] == "2"
        assert config.unused(HOST) == []
    assert (home / "asked").read_text().split() == [HOST, "other"]


@needs_ssh
def test_gateways_behind_themselves_and_options_without_effect(home: Path) -> None:
    file = write(home, "Host *\n  ProxyJump first,second\n  BindAddress 127.0.0.1\n  AddressFamily inet\n")
    assert HostConfig(file).lookup("second").get("proxyjump") is None, "ssh says: jumphost loop"
    assert HostConfig(file, "me", 2222).lookup("other")["port"] == "2222"
    assert HostConfig(file).unused(HOST) == ["addressfamily inet", "bindaddress 127.0.0.1"]
    assert HostConfig(write(home, "")).unused(HOST) == []


@pytest.mark.parametrize(
    "line",
    [
        "Include config.d", 'Include "none"', "Include ${HOME}/none", "Include %d/none",
        "Match exec true", "Match user root", "Foo bar", "Port 1x", "ConnectTimeout 1m",
        "Host [a]*", "CanonicalizeHostname yes", "HostName %n", "ProxyCommand nc %n", "ProxyCommand cat ~/x",
        "IdentityFile %i", "IdentityFile ${HOME}/x", 'User "a" b', "ProxyJump a # b", "Compression",
        "ProxyUseFdpass yes",
    ],
)  # fmt: skip
def test_without_ssh_what_would_be_read_otherwise_is_refused(
    line: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))
    file = write(home, f"Host *\n  {line}\n")
    with pytest.raises(ConfigError, match=f"^{file}, line 2: ") as caught:
        HostConfig(None).lookup(HOST)
    assert line.split()[0] in str(caught.value)


def test_an_ssh_that_is_no_openssh_counts_as_none(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "ssh").write_text("#!/bin/sh\necho 'unknown option -- G' >&2\nexit 1\n")
    (home / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:/bin:/usr/bin")
    write(home, POD)
    assert HostConfig(home / ".ssh/config").lookup(HOST)["proxyjump"] == "gw.example.com"


def test_hops() -> None:
    assert parse_hop("gw") == ("gw", None, None)
    assert parse_hop(" ssh://me@gw.example.com:2222 ") == ("gw.example.com", "me", 2222)
    assert parse_hop("me@corp@[fe80::1]:22") == ("fe80::1", "me@corp", 22)
    for wrong in ("", "a b:c", "gw:ssh", "::1"):
        with pytest.raises(ConfigError, match="ProxyJump"):
            parse_hop(wrong)
