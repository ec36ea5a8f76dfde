"""What the user's SSH config says of a host: OpenSSH's own answer (`ssh -G`), or paramiko's where there is no OpenSSH.

`ssh -G` does what ssh does: it runs the commands of `Match exec` and looks names up for `CanonicalizeHostname`.
paramiko knows less, so what it would read otherwise than ssh is refused.
"""

import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.core.errors import ConfigError

if TYPE_CHECKING:
    from paramiko import SSHConfig

FILES = (Path("~/.ssh/config"), Path("/etc/ssh/ssh_config"))
SECONDS = 60.0
"""Time limit of `ssh -G`, which may run commands and ask name servers."""
LOOP = "jumphost loop"
"""How ssh says that a pattern such as `Host *` sends a gateway through itself."""
HOP = re.compile(r"(?:ssh://)?(?:(?P<user>.*)@)?(?:\[(?P<ipv6>[^]]+)\]|(?P<host>[^:@]+))(?::(?P<port>\d+))?/?")
"""A hop of `ProxyJump`."""
UNUSED = ("addressfamily", "bindaddress", "bindinterface", "certificatefile", "pkcs11provider", "proxyusefdpass")
"""Options that change which connection is made, and that paramiko or Slipway does not have."""


@dataclass(frozen=True)
class HostConfig:
    """Reads what the config says of the hosts that one user logs in to.

    Attributes:
        file: config to read instead of the user's and the system's.
        user: user of the login; None: what the config says.
        port: port of the login, as of a hop of `ProxyJump`; None: what the config says.
    """

    file: Path | None
    user: str | None = None
    port: int | None = None
    _said: dict[str, dict[str, list[str]]] = field(default_factory=dict, compare=False)

    def lookup(self, host: str) -> dict[str, Any]:
        """Return the options that Slipway uses, as paramiko names them; fabric calls this.

        Raises ConfigError if the config cannot be read, or says what cannot be done.
        """
        return self._from_ssh(host) if self._defaults else _from_paramiko(self._paramiko.lookup(host))

    def unused(self, host: str) -> list[str]:
        """Return the options for a host that have no effect, although ssh would connect otherwise with them."""
        said = self._ask(host) if self._defaults else {}
        return [f"{key} {said[key][0]}" for key in UNUSED if key in said and said[key] != self._defaults.get(key)]

    @cached_property
    def _defaults(self) -> Mapping[str, list[str]]:
        """What OpenSSH says without any config; nothing where there is none that works."""
        try:
            return {} if shutil.which("ssh") is None else _parse(_run_ssh(["-F", "none", "--", "localhost"]))
        except ConfigError:  # another program of that name, or ssh does not know this user
            return {}

    def _ask(self, host: str) -> dict[str, list[str]]:
        """Return what OpenSSH says of a host, which is asked once: the commands of the config may take their time."""
        if host not in self._said:
            try:
                self._said[host] = self._ask_with(host)
            except ConfigError as error:
                if LOOP not in str(error):
                    raise
                self._said[host] = self._ask_with(host, "-o", "ProxyJump=none")
        return self._said[host]

    def _ask_with(self, host: str, *options: str) -> dict[str, list[str]]:
        login = [] if self.user is None else ["-l", self.user]
        login += [] if self.port is None else ["-p", str(self.port)]
        if self.file is not None:
            return _parse(_run_ssh(["-F", str(self.file), *options, *login, "--", host]))
        account, home = Path(pwd.getpwuid(os.getuid()).pw_dir), Path.home()
        if account.resolve() == home.resolve() or not (own := home / ".ssh/config").is_file():
            return _parse(_run_ssh([*options, *login, "--", host]))
        with tempfile.NamedTemporaryFile("w", errors="surrogateescape") as copy:  # ssh does not look at HOME
            copy.write(f"{_with_home(own, home)}\nMatch all\nInclude {FILES[1]}\n")
            copy.flush()
            try:
                return _parse(_run_ssh(["-F", copy.name, *options, *login, "--", host]))
            except ConfigError as error:
                raise ConfigError(str(error).replace(copy.name, str(own))) from None

    def _from_ssh(self, host: str) -> dict[str, Any]:
        said = self._ask(host)
        found: dict[str, Any] = {key: said[key][0] for key in ("hostname", "port", "user")}
        if (seconds := said.get("connecttimeout", ["none"])[0]).isdigit():
            found["connecttimeout"] = seconds
        tokens = {
            "%": "%", "h": found["hostname"], "n": host, "p": found["port"], "r": found["user"],
            "u": pwd.getpwuid(os.getuid()).pw_name,
            "d": str(Path.home()), "i": str(os.getuid()), "l": socket.gethostname(),
            "L": socket.gethostname().partition(".")[0], "k": said.get("hostkeyalias", [host])[0],
        }  # fmt: skip
        for key in ("proxyjump", "proxycommand"):
            if (value := said.get(key, ["none"])[0]) != "none":
                found[key] = _expand(key, value, {token: tokens[token] for token in "%hnpr"})
        if "proxycommand" in found and said.get("proxyusefdpass") == ["yes"]:
            raise ConfigError(f"SSH config of {host}: Slipway cannot do `ProxyUseFdpass yes`; set it to no")
        if (files := said.get("identityfile", [])) != self._defaults["identityfile"]:
            keys = [_expand("identityfile", file, tokens) for file in files if file != "none"]
            found["identityfile"] = [str(Path(key).expanduser()) for key in keys]
        return found

    @cached_property
    def _paramiko(self) -> "SSHConfig":
        from paramiko import SSHConfig

        files = [self.file] if self.file is not None else [path.expanduser() for path in FILES]
        config = SSHConfig()
        for path in files:
            try:
                text = path.read_bytes().decode(errors="surrogateescape")
            except OSError as error:
                if isinstance(error, FileNotFoundError) and self.file is None:
                    continue
                raise ConfigError(f"cannot read the SSH config {path}: {error.strerror}") from None
            lines = text.split("\n")
            for number, line in enumerate(lines, 1):
                if problem := _not_understood(line.strip(), path.parent):
                    message = "only OpenSSH reads that, and no `ssh` works on this machine"
                    message += ": `sudo apt-get install openssh-client`"
                    raise ConfigError(f"{path}, line {number}: {problem}; {message}")
            config.parse(lines)
        return config


def parse_hop(hop: str) -> tuple[str, str | None, int | None]:
    """Return host, user and port of a hop of `ProxyJump`. Raises ConfigError if it is none."""
    if (match := HOP.fullmatch(hop.strip())) is None:
        raise ConfigError(f"SSH config: ProxyJump: {hop!r} is not [USER@]HOST[:PORT]")
    port = match["port"]
    return match["ipv6"] or match["host"], match["user"], None if port is None else int(port)


def _run_ssh(words: list[str]) -> str:
    """Return what `ssh -G` prints. Raises ConfigError with ssh's own words, which name file and line."""
    command = ["ssh", "-T", "-G", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=SECONDS,
            encoding="utf-8", errors="surrogateescape",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"`{' '.join(command)}` did not end within {SECONDS:g} s; does a `Match exec` of the SSH config wait?"
        raise ConfigError(message) from None
    if done.returncode:
        said = "; ".join(line.strip() for line in done.stderr.encode(errors="replace").decode().splitlines())
        raise ConfigError(
            f"cannot read the SSH config (`ssh -G {words[-1]}`): {said or f'exit code {done.returncode}'}"
        )
    return done.stdout


def _parse(answer: str) -> dict[str, list[str]]:
    """Return the values of each option in what `ssh -G` prints."""
    found: dict[str, list[str]] = {}
    for line in answer.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def _with_home(file: Path, home: Path) -> str:
    """Return the text of a config, in which `Include` names files below this home, line by line."""

    def include(match: re.Match[str]) -> str:
        words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', match[2])]
        names = [Path(word.replace("~", str(home), 1) if word[:2] == "~/" else word) for word in words]
        return match[1] + " ".join(f'"{home / ".ssh" / name}"' for name in names)

    text = file.read_bytes().decode(errors="surrogateescape")
    return re.sub(r"^([ \t]*include[ \t=]+)([^\n]*)", include, text, flags=re.IGNORECASE | re.MULTILINE)


def _expand(key: str, text: str, tokens: Mapping[str, str]) -> str:
    """Replace the tokens of ssh_config(5), and in names of files also `${NAME}`."""

    def value(match: re.Match[str]) -> str:
        token, name = match.groups()
        known = tokens.get(token) if token else os.environ.get(name)
        if known is None:
            raise ConfigError(f"SSH config, {key} {text}: Slipway does not know {match[0]}")
        return known

    return re.sub(r"%(.)" + (r"|\$\{(\w+)\}" if key == "identityfile" else "|(?!)()"), value, text)


PLAIN_LINE = re.compile(r"(\w+)(?:\s*=\s*|\s+)(.*)")
TOKENS = {"hostname": "h", "proxycommand": "hp", "proxyjump": "hp", "identityfile": "dhlu"}
"""Tokens that paramiko replaces as ssh does: it does not know the user of the login (%r, %C)."""
OPTIONS = frozenset(
    """
    addkeystoagent addressfamily batchmode bindaddress bindinterface canonicaldomains canonicalizefallbacklocal
    canonicalizehostname canonicalizemaxdots canonicalizepermittedcnames casignaturealgorithms certificatefile
    channeltimeout checkhostip ciphers clearallforwardings compression connectionattempts connecttimeout
    controlmaster controlpath controlpersist dynamicforward enableescapecommandline enablesshkeysign escapechar
    exitonforwardfailure fingerprinthash forkafterauthentication forwardagent forwardx11 forwardx11timeout
    forwardx11trusted gatewayports globalknownhostsfile gssapiauthentication gssapidelegatecredentials
    hashknownhosts host hostbasedacceptedalgorithms hostbasedauthentication hostkeyalgorithms hostkeyalias hostname
    identitiesonly identityagent identityfile ignoreunknown include ipqos kbdinteractiveauthentication
    kbdinteractivedevices kexalgorithms knownhostscommand localcommand localforward loglevel logverbose macs match
    nohostauthenticationforlocalhost numberofpasswordprompts obscurekeystroketiming passwordauthentication
    permitlocalcommand permitremoteopen pkcs11provider port preferredauthentications proxycommand proxyjump
    proxyusefdpass pubkeyacceptedalgorithms pubkeyauthentication rekeylimit remotecommand remoteforward requesttty
    requiredrsasize revokedhostkeys securitykeyprovider sendenv serveralivecountmax serveraliveinterval sessiontype
    setenv stdinnull streamlocalbindmask streamlocalbindunlink stricthostkeychecking syslogfacility tag tcpkeepalive
    tunnel tunneldevice updatehostkeys usekeychain user userknownhostsfile verifyhostkeydns visualhostkey
    xauthlocation
    """.split()  # noqa: SIM905
)
"""Options of OpenSSH (https://man.openbsd.org/ssh_config): paramiko says nothing about a misspelt one."""


def _not_understood(line: str, folder: Path) -> str:
    """Return what paramiko would read otherwise than ssh in a line of a config in a folder; empty if nothing."""
    if not line or line.startswith("#"):
        return ""
    match = PLAIN_LINE.fullmatch(line)
    if match is None:
        return f"{line!r} is no option with a value"
    key, value = match[1].lower(), match[2].strip()
    if key not in OPTIONS:
        return f"unknown option {match[1]}"
    if key == "include":
        names = [str(folder / Path(name).expanduser()) for name in value.split()]
        is_plain = not re.search(r"[\"\\%$]", value)  # ssh removes quotes, and newer ones replace variables
        is_empty = is_plain and not any(glob(name) for name in names)  # noqa: PTH207 - they are absolute
        return "" if is_empty else f"{match[1]} {value}: the files are not read"
    doubt = next(_doubts(key, value), "")
    return f"{match[1]} {value}: {doubt}" if doubt else ""


def _doubts(key: str, value: str) -> Iterator[str]:
    if key == "match" and value.lower() != "all":
        yield "conditions are not read"
    if key == "canonicalizehostname" and value.lower() != "no":
        yield "names are not made canonical"
    if key == "proxyusefdpass" and value.lower() != "no":
        yield "is not supported"
    if key in ("port", "connecttimeout") and not value.isdigit():
        yield "is no number"
    if key == "host" and "[" in value:
        yield "has a bracket"
    if key in ("host", "hostname", "port", "user", "proxyjump", "identityfile", "connecttimeout"):
        if re.search(r"\s#", value):
            yield "ends with a comment"
        if '"' in value.removeprefix('"').removesuffix('"') or "\\" in value or "${" in value:
            yield "has quotes, a backslash or a variable"
    if key in TOKENS and (token := re.search(rf"%[^{TOKENS[key]}]|%$", value)):
        yield f"the token {token[0]} is not known"
    if key == "proxycommand" and "~" in value:
        yield "~ would be replaced anywhere"


def _from_paramiko(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, of `ProxyJump` and `ProxyCommand` only the first, as for ssh."""
    found = {key: value for key, value in options.items() if key not in ("proxyjump", "proxycommand")}
    first = next((key for key in options if key in ("proxyjump", "proxycommand")), None)
    if first and options[first] is not None and options[first].lower() != "none":
        found[first] = options[first]
    if "identityfile" in found:
        found["identityfile"] = [file for file in found["identityfile"] if file != "none"]
    return found
