"""From a worker to an authenticated SSH connection with it: by address or through a tunnel, and only if it is itself.

The only file that imports paramiko, and only when a connection is made, for that takes 0.2 s.
"""

from __future__ import annotations

import logging
import socket
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from controller.core.errors import SlipwayError
from controller.ssh.host_keys import HostKeys

if TYPE_CHECKING:
    from paramiko import PKey, SSHConfig, Transport

Kind = Literal["refused", "timeout", "auth", "denied", "host_key", "dropped", "agent"]
SSH_PORT = 22


class WorkerError(SlipwayError):
    """One worker could not be reached, or could not do what it was asked: a value wherever several are asked.

    `kind`: refused (nothing listens, or not yet), timeout, auth (it does not know our key), denied (Google does not let
    us go there), host_key (it is not who it should be), dropped (the connection broke off), agent (the command failed
    there; `detail` says more).
    """

    def __init__(self, worker: int, address: str, kind: Kind, words: str, detail: str = "") -> None:
        super().__init__(f"worker {worker} ({address}): {words}")
        self.worker, self.address, self.kind, self.words, self.detail = worker, address, kind, words, detail


@dataclass(frozen=True)
class Access:
    """How the workers of a pod are reached.

    Attributes:
        pod: its name, for messages.
        user: who we are there.
        key: file of the private key.
        addresses: of the workers, in their order.
        host_keys: reads the keys that Google vouches for now, per worker: lines of `TYPE KEY`.
        ssh_config: an OpenSSH config whose HostName and Port count; by default no file does, not even the user's.
        tunnel: opens a way to port 22 of a worker within so many seconds, something like a socket; by default its
            address is connected to.
        way: how that is called, for messages.
        kept: file in which the host keys of this incarnation of the pod are kept; None: nowhere.
        incarnation: of the pod; host keys that were kept of another are dropped.
        pin_first: take the host key that a worker shows first; by default only one that Google vouches for.
        auth_hint: what else the user may lack where no key is accepted.
        connect_seconds: for a connection to be made.
        warm_up_seconds: how long a fresh worker may refuse.
        silence_seconds: after this long without a word we ask whether the other side lives, and wait as long again.
    """

    pod: str
    user: str
    key: Path
    addresses: Sequence[str]
    host_keys: Callable[[], Sequence[str]]
    ssh_config: Path | None = None
    tunnel: Callable[[int, float], Any] | None = None
    way: str = "its address"
    kept: Path | None = None
    incarnation: str = ""
    pin_first: bool = False
    auth_hint: str = ""
    connect_seconds: float = 15.0
    warm_up_seconds: float = 300.0
    silence_seconds: float = 15.0


class Dialer:
    """Makes the connections of one pod; threads share it. What all of them need is read once."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._host_keys = HostKeys(access.host_keys, access.kept, access.incarnation)
        self._lock = threading.Lock()

    def connect(self, worker: int) -> Transport:
        """A connection on which commands can be run.

        Raises:
            WorkerError: refused, timeout, auth, denied or host_key.
        """
        import paramiko

        access, seconds = self._access, self._access.connect_seconds
        known = self._host_keys.kept(worker) if access.pin_first else self._host_keys.of(worker)
        if not known and not access.pin_first:
            raise self._error(worker, "refused", "it has not published its SSH host keys yet")
        with self._lock:
            key, _ = self._private_key, self._config
        with self._told_apart(worker):
            transport = paramiko.Transport(self._socket(worker))
            try:
                transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = seconds
                _prefer(transport, known)
                _shake_hands(transport, seconds)
                self._recognise(worker, transport.get_remote_server_key(), known)
                transport.auth_publickey(access.user, key)
            except BaseException:
                transport.close()
                raise
        return transport

    def _socket(self, worker: int) -> Any:
        access = self._access
        if access.tunnel is not None:
            return access.tunnel(worker, access.connect_seconds)
        found = self._config.lookup(access.addresses[worker])
        made = socket.create_connection(
            (found["hostname"], int(found.get("port", SSH_PORT))), timeout=access.connect_seconds
        )
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _recognise(self, worker: int, shown: PKey, known: dict[str, str]) -> None:
        """Is it the worker that it should be?

        Raises:
            WorkerError: host_key.
        """
        kind, text = shown.get_name(), shown.get_base64()
        if not known:
            self._host_keys.pin(worker, kind, text)
            return
        if known.get(kind) == text:
            return
        shows = f"it shows the SSH host key {kind} {shown.fingerprint}"
        expected = ", ".join(f"{k} {_fingerprint(k, t)}" for k, t in known.items())
        again = f"If you know why, delete {self._access.kept} and try again; `slipway down` drops it too"
        if self._access.pin_first:
            words = f"{shows}, but at first it was {expected}. {again}"
        elif self._host_keys.published(worker).get(kind) == text:
            words = (
                f"{shows}, which worker {worker} of {self._access.pod} publishes now, but this VM was known by "
                f"{expected}: it was rebuilt, or somebody else has got hold of it. {again}"
            )
        else:
            words = (
                f"{shows}, not the one that worker {worker} of {self._access.pod} has published ({expected}): "
                "something else answers there. Nothing was sent to it; run again in a minute, and if this stays take "
                "the pod down"
            )
        raise self._error(worker, "host_key", words)

    @contextmanager
    def _told_apart(self, worker: int) -> Iterator[None]:
        """Failures to connect, by what can be done about them."""
        from paramiko import AuthenticationException, SSHException

        seconds = self._access.connect_seconds
        try:
            yield
        except AuthenticationException as error:
            words = f"it does not let {self._access.user} in with our key (yet?): {error}"
            raise self._error(worker, "auth", "; ".join(filter(None, (words, self._access.auth_hint)))) from error
        except PermissionError as error:
            raise self._error(worker, "denied", str(error)) from error
        except TimeoutError as error:
            words = f"no connection by way of {self._access.way} within {seconds:g} s; does a firewall rule admit that "
            words += "to tcp:22? Another ssh.method goes another way"
            raise self._error(worker, "timeout", words) from error
        except (OSError, SSHException, EOFError) as error:
            raise self._error(worker, "refused", f"no SSH: {error or type(error).__name__}") from error

    def _error(self, worker: int, kind: Kind, words: str) -> WorkerError:
        return WorkerError(worker, self._access.addresses[worker], kind, words)

    @cached_property
    def _config(self) -> SSHConfig:
        from paramiko import SSHConfig

        _keep_quiet()
        return SSHConfig.from_path(str(self._access.ssh_config)) if self._access.ssh_config else SSHConfig()

    @cached_property
    def _private_key(self) -> PKey:
        from paramiko import Ed25519Key

        return Ed25519Key.from_private_key_file(str(self._access.key))


def _shake_hands(transport: Transport, seconds: float) -> None:
    from paramiko import SSHException

    agreed = threading.Event()
    transport.start_client(event=agreed)
    if not agreed.wait(seconds):
        raise TimeoutError
    if not transport.is_active():
        raise transport.get_exception() or SSHException("no agreement on how to speak")


def _prefer(transport: Transport, known: dict[str, str]) -> None:
    """Ask for the kinds of host key that are known, Ed25519 first; else a server shows another that it also has."""
    options = transport.get_security_options()
    wanted = [kind for kind in options.key_types if _family(kind) in known]
    wanted.sort(key=lambda kind: kind != "ssh-ed25519")
    options.key_types = (*wanted, *(kind for kind in options.key_types if kind not in wanted))


def _family(kind: str) -> str:
    """RSA keys are one kind and sign in several ways: https://www.rfc-editor.org/rfc/rfc8332"""
    return "ssh-rsa" if kind.startswith("rsa-sha2-") else kind


def _fingerprint(kind: str, text: str) -> str:
    from paramiko import PKey

    return PKey.from_type_string(kind, b64decode(text)).fingerprint


def _keep_quiet() -> None:
    """paramiko logs with tracebacks what it also raises; without a handler that would reach the terminal."""
    logger = logging.getLogger("paramiko")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
