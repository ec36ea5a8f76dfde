"""SSH connections as `fabric.Connection` objects, one per worker, configured by `ConnectionParams`.

The only module that imports fabric. It is imported when a connection opens, because that takes 0.2 s.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import subprocess
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fabric import Config, Connection
from paramiko import (
    AuthenticationException,
    BadHostKeyException,
    Ed25519Key,
    MissingHostKeyPolicy,
    PKey,
    SSHClient,
    SSHException,
    Transport,
)

from controller.ssh.agent_link import ConnectionFailure, ConnectionParams, WorkerError
from controller.ssh.login import HostKeys, KnownKeys
from controller.ssh.ssh_config import HostConfig, parse_hop

KNOWN_HOSTS = ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")


class Connector:
    """Creates the connections of one pod. They share the host keys, the client key, ~/.ssh/config and the gateways."""

    def __init__(
        self, access: ConnectionParams, accept_new_host_key: Callable[[int, str], bool] = lambda worker, message: False
    ) -> None:
        """Read the client key. The SSH config is read when a connection is created.

        `accept_new_host_key` gets a worker and a message, and returns whether its host key may have changed.
        """
        logger = logging.getLogger("paramiko")
        if not logger.handlers:  # it logs tracebacks of the errors that it also raises
            logger.addHandler(logging.NullHandler())
        self.accept_new_host_key = accept_new_host_key
        self.access = access
        self.host_keys = HostKeys(access.host_keys, access.known_hosts_file, access.incarnation)
        self.key = Ed25519Key.from_private_key_file(str(access.key))
        self.config = self.settings(access.user)
        self.closed = False
        self._lock = threading.RLock()
        self._gateways: dict[tuple[str, ...], GatewayConnection] = {}

    def settings(self, user: str | None, port: int | None = None) -> Config:
        """Return fabric's settings for the hosts that a user logs in to; ~/.fabric.yaml is for other programs."""
        overrides = {"run": {"in_stream": False}, "timeouts": {"connect": math.ceil(self.access.connect_seconds)}}
        return Config(overrides=overrides, ssh_config=HostConfig(self.access.ssh_config, user, port), lazy=True)

    def connection(self, worker: int) -> WorkerConnection:
        """Return a new connection to a worker; it opens on first use. Raises ConfigError as `HostConfig.lookup`."""
        return WorkerConnection(self, worker)

    def gateway(self, hops: tuple[str, ...]) -> GatewayConnection:
        """Return the connection to the last hop of a `ProxyJump`, shared by all workers behind it."""
        with self._lock:
            if hops not in self._gateways:
                before = self.gateway(hops[:-1]) if hops[1:] else None
                self._gateways[hops] = GatewayConnection(self, hops[-1], before)
            return self._gateways[hops]

    def close(self) -> None:
        """Close the gateways and refuse to open further connections."""
        self.closed = True
        for gateway in self._gateways.values():
            gateway.close()


class _HonoursConfig(Connection):
    """Connection that finds its gateway in ~/.ssh/config. Several threads may open it.

    Plain fabric trusts any host key of a gateway, visits the hops of `ProxyJump a,b` in reverse order, and connects to
    a gateway called "none".
    """

    if TYPE_CHECKING:  # fabric declares these as None and sets them later
        client: SSHClient
        transport: Transport
        ssh_config: dict[str, Any]
        connect_kwargs: dict[str, Any]

    inline_ssh_env = None  # fabric sets it; without the attribute, it would merge all settings again each time

    def __init__(self, dialer: Connector, host: str, settings: Config, **options: Any) -> None:
        self._set(dialer=dialer, opening=threading.Lock(), proxy=None)  # fabric takes other new attributes for settings
        super().__init__(host, config=settings, forward_agent=False, **options)
        files = self.connect_kwargs.get("key_filename", [])
        self.connect_kwargs["key_filename"] = [file for file in files if os.access(file, os.R_OK)]  # as ssh does

    def get_gateway(self) -> GatewayConnection | str | None:
        if "proxyjump" not in self.ssh_config:
            return self.ssh_config.get("proxycommand")
        hops = tuple(self.ssh_config["proxyjump"].split(","))
        ours = (self.host, self.original_host), (None, self.port)
        if any(host in ours[0] and port in ours[1] for host, _, port in map(parse_hop, hops)):
            return None  # a pattern such as `Host *` includes the gateway itself
        return self.dialer.gateway(hops)

    def open_gateway(self) -> Any:
        if callable(self.gateway):
            return self.gateway()
        if isinstance(self.gateway, GatewayConnection):
            self.gateway.open()
            return super().open_gateway()
        ours, theirs = socket.socketpair()  # paramiko's ProxyCommand busy-waits after the command ends
        with theirs:
            argv, end = ["/bin/sh", "-c", f"exec {self.gateway}"], theirs.fileno()
            self.proxy = subprocess.Popen(argv, stdin=end, stdout=end)
        return ours

    def open(self) -> None:
        with self.opening:
            if self.is_connected:
                return
            self._hang_up()
            self._sftp = None  # belongs to the previous connection
            try:
                self._open()
            except BaseException:
                self._hang_up()
                raise

    def _open(self) -> None:
        super().open()

    def close(self) -> None:
        self._sftp = None  # ends with the connection; closing it first would send a message, which may fail
        super().close()
        self._hang_up()

    def _hang_up(self) -> None:
        self.client.close()
        if self.proxy is not None:
            self.proxy.terminate()
            self.proxy.wait()
            self.proxy = None


class GatewayConnection(_HonoursConfig):
    """Connection to a hop of `ProxyJump`. A known_hosts file must hold its host key, whatever ~/.ssh/config says."""

    def __init__(self, dialer: Connector, hop: str, before: GatewayConnection | None) -> None:
        seconds = dialer.access.connect_seconds
        host, user, port = parse_hop(hop)
        super().__init__(
            dialer,
            host,
            dialer.settings(user, port),
            user=user,
            port=port,
            gateway=before,
            connect_kwargs={"banner_timeout": seconds, "auth_timeout": seconds},
        )
        self.client.set_missing_host_key_policy(_Policy(self._refuse))
        for file in map(os.path.expanduser, KNOWN_HOSTS):
            if os.access(file, os.R_OK):
                self.client.load_system_host_keys(file)

    def _open(self) -> None:
        try:
            super()._open()
        except (AuthenticationException, BadHostKeyException) as error:
            raise PermissionError(f"gateway {self.original_host} ({self.user}): {error}") from error
        except PermissionError:
            raise
        except (OSError, SSHException, EOFError) as error:
            raise ConnectionRefusedError(f"gateway {self.original_host}: {_reason(error)}") from error

    def _refuse(self, key: PKey) -> None:
        raise PermissionError(
            f"gateway {self.original_host} has the host key {key.get_name()} {key.fingerprint}, which is not in "
            f"~/.ssh/known_hosts; to add it, run `ssh {self.original_host}` and compare the key"
        )


class WorkerConnection(_HonoursConfig):
    """`fabric.Connection` to one worker: `run`, `put`, `get`, `forward_local`. It opens on first use.

    It honors HostName, Port, ProxyJump, ProxyCommand and IdentityFile of ~/.ssh/config. `ssh.user` and
    `ssh.connect_timeout_seconds` replace User and ConnectTimeout; the host key must be one of `ConnectionParams`.
    """

    def __init__(self, dialer: Connector, worker: int) -> None:
        access, seconds = dialer.access, dialer.access.connect_seconds
        self._set(worker=worker, known={}, recognised=False)
        super().__init__(
            dialer,
            access.addresses[worker],
            dialer.config,
            user=access.user,
            gateway=None if access.tunnel is None else partial(access.tunnel, worker, seconds),
            connect_kwargs={
                "pkey": dialer.key,
                "allow_agent": False,
                "look_for_keys": False,
                "banner_timeout": seconds,
                "auth_timeout": seconds,
                "channel_timeout": seconds,
                "transport_factory": self._make_transport,
            },
        )
        self.connect_timeout = seconds  # fabric would round it
        self.client.set_missing_host_key_policy(_Policy(self._verify_host_key))

    def _open(self) -> None:
        """Try once to connect. Raises WorkerError: refused, timeout, auth, denied, host_key or dropped."""
        if self.dialer.closed:
            raise self._error("dropped", "the connection was closed on this side")
        trust_on_first_use = self.dialer.access.trust_on_first_use
        host_keys = self.dialer.host_keys
        with self._told_apart():
            self.known = (host_keys.cached if trust_on_first_use else host_keys.keys_of)(self.worker)
        if not self.known and not trust_on_first_use:
            raise self._error("refused", "it has not published its SSH host keys yet")
        self.recognised = False
        with self._told_apart():
            super()._open()

    def _make_transport(self, sock: Any, **options: Any) -> Transport:
        if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport = Transport(sock, **options)
        transport.handshake_timeout = self.dialer.access.connect_seconds
        _prefer_key_types(transport, self.known)
        return transport

    def _verify_host_key(self, shown: PKey) -> None:
        """Check the host key that the server shows. Raises WorkerError of kind host_key."""
        access, host_keys, known = self.dialer.access, self.dialer.host_keys, self.known
        kind, text = shown.get_name(), shown.get_base64()
        if not known:
            host_keys.pin(self.worker, kind, text)
        elif known.get(kind) != text:
            shows = f"its SSH host key is {kind} {shown.fingerprint}"
            expected = ", ".join(f"{k} {PKey.from_type_string(k, b64decode(t)).fingerprint}" for k, t in known.items())
            again = (
                f"If you expected this, delete {access.known_hosts_file} and try again; `slipway down` deletes it too"
            )
            published = not access.trust_on_first_use and host_keys.published(self.worker).get(kind) == text
            accepted = f"{shows} instead of {expected}, as after a repair; Google publishes it, so it is accepted"
            if published and self.dialer.accept_new_host_key(self.worker, f"worker {self.worker}: {accepted}"):
                host_keys.replace(self.worker, kind, text)
                self.recognised = True
                return
            if access.trust_on_first_use:
                message = f"{shows}, but was {expected} on first use. {again}"
            elif published:
                message = (
                    f"{shows}, which worker {self.worker} of {access.pod} publishes now, but this VM had {expected} "
                    f"before: Google repaired it while no controller was looking, or someone else controls it. {again}"
                    ". ssh.host_keys=follow_guest_attributes accepts every key that Google publishes"
                )
            else:
                message = (
                    f"{shows}, but worker {self.worker} of {access.pod} has published {expected}: another machine "
                    "answers at its address. Nothing was sent to it; try again in a minute, and if the error "
                    "persists, run `slipway down`"
                )
            raise self._error("host_key", message)
        self.recognised = True

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Turn connection failures into WorkerErrors whose kind tells what the user can do."""
        access = self.dialer.access
        try:
            yield
        except PermissionError as error:
            raise self._error("denied", str(error)) from error
        except (OSError, SSHException, EOFError) as error:
            transport = self.client.get_transport()
            alive = transport is not None and transport.is_active()
            if isinstance(error, AuthenticationException) or (self.recognised and alive):
                message = f"it does not accept user {access.user} with Slipway's SSH key: {error}"
                raise self._error("auth", "; ".join(filter(None, (message, access.auth_hint)))) from error
            if isinstance(error, TimeoutError) or alive:
                message = f"no connection through {access.route} within {access.connect_seconds:g} s; does a firewall "
                message += "rule allow tcp:22 from there? You can also set another ssh.method"
                raise self._error("timeout", message) from error
            raise self._error("refused", f"no SSH connection: {_reason(error)}") from error

    def _error(self, kind: ConnectionFailure, message: str) -> WorkerError:
        return WorkerError(self.worker, self.dialer.access.addresses[self.worker], kind, message)


class _Policy(MissingHostKeyPolicy):
    """Leaves the decision about a host key to a function, which raises if it refuses."""

    def __init__(self, decide: Callable[[PKey], None]) -> None:
        self._decide = decide

    def missing_host_key(self, client: object, hostname: str, key: PKey) -> None:
        self._decide(key)


def _prefer_key_types(transport: Transport, known: KnownKeys) -> None:
    """Request the known types of host key, Ed25519 first; otherwise the server may show a key of another type."""
    options = transport.get_security_options()
    families = {kind: "ssh-rsa" if kind.startswith("rsa-sha2-") else kind for kind in options.key_types}  # RFC 8332
    wanted = [kind for kind, family in families.items() if family in known]
    wanted.sort(key=lambda kind: kind != "ssh-ed25519")
    options.key_types = (*wanted, *(kind for kind in options.key_types if kind not in wanted))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
