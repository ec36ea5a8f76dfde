"""Choose the route to a pod's workers: external addresses, Identity-Aware Proxy (IAP) or internal addresses.

IAP reaches VMs without an external address, by the protocol of gcloud's client: a WebSocket of subprotocol
relay.tunnel.cloudproxy.app with binary messages. A message is a tag (2 bytes), then either a length (4 bytes) and data,
or a count of received bytes (8 bytes). https://cloud.google.com/iap/docs/tcp-forwarding-overview
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlencode

from conf.schema.cloud import IAP_RANGE
from conf.schema.config import Config
from controller.core.this_process import Clock
from controller.gcp.answers import TAG, admits, leaf
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import ForbiddenError, GoogleError
from controller.ssh.agent_link import ConnectionParams
from controller.ssh.fleet import Fleet, SshTarget
from controller.ssh.login import Login, private_key

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

IAP_ENDPOINT = "wss://tunnel.cloudproxy.app/v4"
SUBPROTOCOL = "relay.tunnel.cloudproxy.app"
ORIGIN = "bot:iap-tunneler"
CONNECTED, DATA, ACK = 0x0001, 0x0004, 0x0007
MAX_FRAME_BYTES = 16384
"""Maximum bytes of data in one message."""
ROLE = "roles/iap.tunnelResourceAccessor"
REFUSALS = {
    4003: "IAP reaches the VM, but the port does not answer: does a firewall rule allow 35.235.240.0/20?",
    4033: f"IAP denies you access: you need {ROLE}",
    4047: "IAP cannot find the VM; it may not be registered yet",
}
"""Messages for the codes with which IAP closes the WebSocket."""


@dataclass(frozen=True)
class IapTarget:
    """Port of a VM. `instance` is its Compute Engine name; a TPU VM has it in the guest attribute `hostname`."""

    project: str
    zone: str
    instance: str
    port: int = 22
    interface: str = "nic0"


class IapTunnel:
    """TCP connection with the socket methods that paramiko uses."""

    def __init__(self, websocket: ClientConnection, opened: ExitStack) -> None:
        self._websocket, self._opened = websocket, opened
        self._buffer = b""
        self._received = self._acknowledged = 0
        self._seconds: float | None = None
        self._closed = False  # paramiko reads this attribute

    def settimeout(self, seconds: float | None) -> None:
        self._seconds = seconds

    def send(self, data: bytes) -> int:
        """Send the beginning of `data` and return how many bytes. Raises BrokenPipeError if the tunnel is closed."""
        from websockets.exceptions import ConnectionClosed

        part = bytes(data[:MAX_FRAME_BYTES])
        try:
            self._websocket.send(struct.pack(">HI", DATA, len(part)) + part)
        except ConnectionClosed as error:
            raise BrokenPipeError(_refusal_reason(error)) from None
        return len(part)

    def recv(self, size: int) -> bytes:
        """Return up to `size` bytes; none after the other side has closed. Raises TimeoutError."""
        from websockets.exceptions import ConnectionClosed

        while not self._buffer:
            try:
                tag, content = _parse_message(self._websocket.recv(timeout=self._seconds))
                if tag == DATA:
                    self._receive_data(content)
            except ConnectionClosed:
                return b""
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def close(self) -> None:
        self._closed = True
        self._opened.close()

    def _receive_data(self, content: bytes) -> None:
        (length,) = struct.unpack_from(">I", content)
        self._buffer = content[4 : 4 + length]
        self._received += length
        if self._received - self._acknowledged > 2 * MAX_FRAME_BYTES:
            self._websocket.send(struct.pack(">HQ", ACK, self._received))
            self._acknowledged = self._received


def open_tunnel(target: IapTarget, token: Callable[[], str], seconds: float, endpoint: str = IAP_ENDPOINT) -> IapTunnel:
    """Open a tunnel.

    Args:
        token: returns the caller's access token.
        seconds: timeout.
        endpoint: URL of the proxy.

    Raises:
        PermissionError: IAP denies access.
        TimeoutError: no answer in time.
        ConnectionError: the tunnel failed for another reason.
    """
    from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
    from websockets.sync.client import connect
    from websockets.typing import Origin, Subprotocol

    query = {"project": target.project, "port": target.port, "newWebsocket": "True", "zone": target.zone}
    query |= {"instance": target.instance, "interface": target.interface}
    opened = ExitStack()
    try:
        websocket = opened.enter_context(
            connect(
                f"{endpoint}/connect?{urlencode(query)}",
                origin=Origin(ORIGIN),
                subprotocols=[Subprotocol(SUBPROTOCOL)],
                additional_headers={"Authorization": f"Bearer {token()}"},
                compression=None,
                open_timeout=seconds,
                close_timeout=0.5,
                ping_interval=None,  # SSH has its own keepalive
                user_agent_header="slipway",
            )
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PermissionError(f"IAP denies you access ({status}): is iap.googleapis.com enabled?") from None
        raise ConnectionRefusedError(f"IAP returned HTTP {status}") from None
    except (InvalidHandshake, EOFError) as error:
        raise ConnectionRefusedError(f"cannot open a tunnel through IAP: {error}") from None
    with opened:
        try:
            tag, _ = _parse_message(websocket.recv(timeout=seconds))
        except ConnectionClosed as error:
            code = error.rcvd.code if error.rcvd else 0
            raise (PermissionError if code == 4033 else ConnectionRefusedError)(_refusal_reason(error)) from None
        if tag != CONNECTED:
            raise ConnectionRefusedError(f"IAP uses an unknown protocol: its first message has tag {tag}")
        return IapTunnel(websocket, opened.pop_all())


def _parse_message(message: str | bytes) -> tuple[int, bytes]:
    """Return tag and content. The caller ignores unknown tags."""
    content = message.encode() if isinstance(message, str) else message
    return (struct.unpack_from(">H", content)[0], content[2:]) if len(content) >= 2 else (0, b"")


def _refusal_reason(error: Exception) -> str:
    received = getattr(error, "rcvd", None)
    if received is None:
        return "the tunnel through IAP was lost"
    return REFUSALS.get(received.code, f"IAP closed the tunnel: {received.code} {received.reason}")


Route = Literal["external", "iap", "internal"]
Rule = dict[str, Any]
OS_LOGIN_HINT = (
    "OS Login is on: you need roles/compute.osAdminLogin, and roles/iam.serviceAccountUser on the pod's account"
)

NO_ATTRIBUTES_HINT = (
    "Guest attributes hold the SSH host keys, and the VM names for IAP. If the policy "
    "constraints/compute.disableGuestAttributesAccess forbids them, set ssh.host_keys=trust_on_first_use and "
    "ssh.method=external or internal"
)
NOTHING_PUBLISHED = (400, 404, 412)
"""Answers about a VM that has not published any guest attribute yet."""


IP_SERVICES = ("https://checkip.amazonaws.com", "https://ipv4.icanhazip.com")
"""Each returns the caller's IPv4 address as text; the second is the fallback."""
IP_SECONDS = 5.0


def find_public_ip(services: tuple[str, ...] = IP_SERVICES) -> str | None:
    """Return the public IPv4 address, or None if no service answers. Uses the network, as SSH without a proxy."""
    from urllib.request import ProxyHandler, build_opener

    for service in services:
        try:
            with build_opener(ProxyHandler({})).open(service, timeout=IP_SECONDS) as answer:
                text = answer.read(64).decode().strip()
            return str(ipaddress.IPv4Address(text))
        except (OSError, ValueError):
            continue
    return None


@dataclass(frozen=True)
class PodConnector:
    """Opens the SSH connections to a pod by the route that `ssh.method` sets.

    Attributes:
        find_public_ip: returns this machine's address as the workers see it, or None.
        iap: endpoint of the Identity-Aware Proxy.
        ssh_config: see `ConnectionParams`.
    """

    config: Config
    google: GoogleClient
    clock: Clock
    login: Login
    find_public_ip: Callable[[], str | None]
    iap: str = IAP_ENDPOINT
    ssh_config: Path | None = None

    def connect(self, pod: SshTarget) -> Fleet:
        """Return the connections to the workers. Each opens on first use."""
        ssh, login, way = self.config.ssh, self.login, self.route_to(pod)
        guests = GuestAttributes(self.google, pod, login.project, self.iap)
        access = ConnectionParams(
            pod=pod.name,
            user=login.user_name(),
            key=private_key(login.key_dir),
            addresses=[(way == "external" and external) or internal for internal, external in pod.addresses],
            host_keys=guests.host_keys,
            ssh_config=self.ssh_config,
            tunnel=guests.tunnel if way == "iap" else None,
            route={"external": "its external address", "iap": "IAP", "internal": "its internal address"}[way],
            known_hosts_file=login.state / "known_hosts" / login.project.replace(":", "_") / pod.name,
            incarnation=pod.uid,
            trust_on_first_use=ssh.host_keys == "trust_on_first_use",
            follow_host_keys=ssh.host_keys == "follow_guest_attributes",
            auth_hint=OS_LOGIN_HINT if login.uses_os_login else "",
            connect_seconds=ssh.connect_timeout_seconds,
            warm_up_seconds=ssh.ready_timeout_seconds,
        )
        return Fleet(access, self.clock.sleep)

    def route_to(self, pod: SshTarget) -> Route:
        """Return `ssh.method`; for auto, the best route that the firewall rules allow.

        That is the external address if a rule admits this machine, else IAP if a rule admits it, else the internal
        address.
        """
        if self.config.ssh.method != "auto":
            return self.config.ssh.method
        external = bool(pod.addresses) and all(external for _, external in pod.addresses)
        return choose_route(self._rules(pod.network), external=external, laptop=self.find_public_ip, tags=pod.tags)

    def _rules(self, network: str) -> list[Rule]:
        """Return the firewall rules of a network, or those of the config if the caller may not list them."""
        try:
            rules = list(self.google.list_all("compute", "firewalls.list", "items", project=self.login.project))
        except ForbiddenError:
            ranges = list(self.config.network.all_ssh_source_ranges)
            return [{"allowed": [{"IPProtocol": "tcp", "ports": ["22"]}], "sourceRanges": ranges}]
        return [rule for rule in rules if leaf(rule.get("network", "")) == leaf(network)]


def choose_route(
    rules: Sequence[Rule], *, external: bool, laptop: Callable[[], str | None], tags: Iterable[str] = (TAG,)
) -> Route:
    """Return the best route that the rules allow. `laptop` may use the network, so it is called only if needed."""
    tags = tuple(tags)
    if external and any(_may_contain_us(block) for rule in rules for block in rule.get("sourceRanges", ())):
        ours = laptop()
        if ours is not None and admits_ssh(rules, f"{ours}/32", tags):
            return "external"
    return "iap" if admits_ssh(rules, IAP_RANGE, tags) else "internal"


def admits_ssh(rules: Iterable[Rule], source: str, tags: Iterable[str]) -> bool:
    """Return whether the rules together let `source` reach port 22.

    The matching rule with the lowest priority number decides; among equals, a deny rule:
    https://cloud.google.com/firewall/docs/firewalls#priority_order_for_firewall_rules.
    """
    for rule in sorted(rules, key=lambda rule: (rule.get("priority", 1000), "denied" not in rule)):
        spoken = rule.get("denied", rule.get("allowed", ()))
        if admits({**rule, "allowed": spoken}, ("tcp:22",), (source,), tags):
            return "denied" not in rule
    return False


def _may_contain_us(block: str) -> bool:
    """Return whether this machine's address can be in that range. The emulated cloud sees it on loopback."""
    range_ = ipaddress.ip_network(block, strict=False)
    return block != IAP_RANGE and (range_.is_loopback or not range_.is_private)


class GuestAttributes:
    """Reads the workers' guest attributes: SSH host keys and VM names."""

    def __init__(self, google: GoogleClient, pod: SshTarget, project: str, iap: str) -> None:
        self._google, self._pod, self._project, self._iap = google, pod, project, iap
        self._names: list[str] = []

    def host_keys(self) -> list[str]:
        """Return the host keys that each worker publishes now, as lines of `TYPE KEY`. Raises OSError as `_read`."""
        return [
            "\n".join(f"{item['key']} {item['value']}" for item in items if item.get("namespace") == "hostkeys")
            for items in self._read()
        ]

    def tunnel(self, worker: int, seconds: float) -> IapTunnel:
        """Open a tunnel through IAP to port 22 of a worker. IAP needs the VM's name, guest attribute `hostname`.

        Raises OSError as `open_tunnel` does, and if the worker has not published its name yet.
        """
        if not self._name(worker):
            self._read()
        if not (name := self._name(worker)):
            raise ConnectionRefusedError("it has not published its VM name yet, which IAP requires")
        target = IapTarget(self._project, self._pod.zone, name)
        return open_tunnel(target, self._google.token, seconds, self._iap)

    def _name(self, worker: int) -> str:
        return self._names[worker] if worker < len(self._names) else ""

    def _read(self) -> Sequence[Sequence[dict[str, str]]]:
        """Return each worker's attributes; none before the first worker has published any.

        Raises:
            PermissionError: Google refuses them, for instance by an organization policy.
            ConnectionRefusedError: Google could not be asked.
        """
        try:
            found = self._pod.vms.guest_attributes(self._google)
        except GoogleError as error:
            if isinstance(error, ForbiddenError) or error.is_policy:
                raise PermissionError(f"{error}. {NO_ATTRIBUTES_HINT}") from error
            if error.status not in NOTHING_PUBLISHED:
                raise ConnectionRefusedError(f"cannot read its guest attributes: {error}") from error
            found = []
        self._names = [next((i["value"] for i in items if i["key"] == "hostname"), "") for items in found]
        return found
