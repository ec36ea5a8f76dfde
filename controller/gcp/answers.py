"""Read Google's answers: items with their labels and marks, timestamps, firewall rules; and long-running operations.

Waiting for operations raises their errors as exceptions. Compute:
https://cloud.google.com/compute/docs/api/how-tos/api-requests-responses; TPU and Service Usage:
https://google.aip.dev/151.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from controller.core.this_process import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import GoogleError

LABEL = {"managed-by": "slipway"}
"""Label on every resource that takes labels."""
MARK = "made by slipway"
"""Prefix of the description where labels do not exist: networks, subnets, routers, firewall rules, service accounts."""
TAG = "slipway"
"""Network tag of the workers, which the firewall rules target."""


def leaf(url: str) -> str:
    return url.rsplit("/", 1)[-1]


def is_marked(item: dict[str, Any]) -> bool:
    """Return whether the item's description starts with the mark; more text may follow."""
    return item.get("description", "").startswith(MARK)


def is_labelled(item: dict[str, Any]) -> bool:
    return LABEL.items() <= item.get("labels", {}).items()


def parse_timestamp(timestamp: str | None) -> float:
    """Parse RFC 3339 to seconds since the epoch; 0 where Google sends none. Nanoseconds are cut to microseconds."""
    if not timestamp:
        return 0.0
    head, dot, tail = timestamp.rstrip("Z").partition(".")
    return datetime.fromisoformat(f"{head}{dot}{tail[:6]}+00:00").timestamp()


ANY_ADDRESS = "0.0.0.0/0"
Item = dict[str, Any]


def admits(rule: Item, allowed: Iterable[str], sources: Iterable[str], tags: Iterable[str]) -> bool:
    """Return whether one rule admits all of `allowed` from every source to VMs with these tags.

    `allowed` entries read `tcp:22`, `tcp` or `icmp`. Deny rules of higher priority are ignored: they are deliberate.
    """
    targets = set(rule.get("targetTags", ()))
    if rule.get("disabled") or rule.get("direction", "INGRESS") != "INGRESS" or rule.get("targetServiceAccounts"):
        return False
    return (
        (not targets or not targets.isdisjoint(tags))
        and all(any(_protocol_matches(entry, wanted) for entry in rule.get("allowed", ())) for wanted in allowed)
        and all(any(_range_contains(source, block) for block in rule.get("sourceRanges", ())) for source in sources)
    )


def _protocol_matches(entry: Item, wanted: str) -> bool:
    protocol, _, port = wanted.partition(":")
    if entry["IPProtocol"] not in (protocol, "all"):
        return False
    if not entry.get("ports"):
        return True
    ranges = (text.partition("-") for text in entry["ports"])
    first, last = (int(port), int(port)) if port else (1, 65535)
    return any(int(low) <= first and last <= int(high or low) for low, _, high in ranges)


def _range_contains(source: str, block: str) -> bool:
    inner, outer = ipaddress.ip_network(source, strict=False), ipaddress.ip_network(block, strict=False)
    if isinstance(inner, ipaddress.IPv4Network) and isinstance(outer, ipaddress.IPv4Network):
        return inner.subnet_of(outer)
    both = isinstance(inner, ipaddress.IPv6Network) and isinstance(outer, ipaddress.IPv6Network)
    return both and ipaddress.IPv6Network(inner).subnet_of(ipaddress.IPv6Network(outer))


class Caller(Protocol):
    """Context of a caller that waits; `poll_seconds` is in seconds between polls."""

    google: GoogleClient
    clock: Clock
    project: str
    poll_seconds: float


class OperationFailedError(GoogleError):
    """An operation that was accepted and then failed; `status` is 0."""


OPERATION_SECONDS = 2400.0
"""How long an operation may take without a limit of its own; a group was deleted in half an hour (kubernetes 76492)."""


def wait_compute(caller: Caller, operation: dict[str, Any], seconds: float | None = None) -> None:
    """Wait for a Compute operation, of any scope.

    Args:
        caller: who waits.
        operation: as Google answered.
        seconds: limit of the wait, of tpu.create_timeout_minutes; None: that of any operation.

    Raises:
        OperationFailedError: with Compute's error code as reason, or it takes longer than that.
        InterruptedSleepError: as of `Clock.sleep`; the operation goes on.
    """
    scope, where = _scope_of(caller, operation)
    again = partial(caller.google.call, "compute", f"{scope}Operations.wait", **where)
    late = caller.clock.deadline(OPERATION_SECONDS if seconds is None else seconds)
    while operation.get("status") != "DONE":
        if late():
            raise _too_late("compute", seconds)
        operation = caller.clock.await_answer(again)
    _raise_failed(operation)


def poll_compute(caller: Caller, operation: dict[str, Any], seconds: float) -> Callable[[], bool]:
    """Return what tells whether a Compute operation is done, without waiting; it raises as `wait_compute` does."""
    late = caller.clock.deadline(seconds)
    scope, where = _scope_of(caller, operation)
    answers = _answers(operation, lambda: caller.google.call("compute", f"{scope}Operations.get", **where))

    def is_done() -> bool:
        found = next(answers)
        if found.get("status") != "DONE":
            if late():
                raise _too_late("compute", seconds)
            return False
        _raise_failed(found)
        return True

    return is_done


def _answers(operation: dict[str, Any], again: Callable[[], dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the operation as Google answered first, then as it answers each time until it is done."""
    while True:
        yield operation
        if not operation.get("done") and operation.get("status") != "DONE":
            operation = again()


def _scope_of(caller: Caller, operation: dict[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the scope of a Compute operation, and the parameters that name it."""
    where: dict[str, str] = {"project": caller.project, "operation": operation["name"]}
    for scope in ("zone", "region"):
        if operation.get(scope):
            return scope, where | {scope: operation[scope].rsplit("/", 1)[-1]}
    return "global", where


def _raise_failed(operation: dict[str, Any]) -> None:
    errors = operation.get("error", {}).get("errors", [])
    if errors:
        what = f"compute {operation.get('operationType', 'operation')}"
        raise OperationFailedError(what, 0, errors[0].get("code", "ERROR"), errors[0].get("message", ""))


NOTHING_TO_DO = "operations/noop."
"""Begin of the name of Service Usage's operation on what was so already. It cannot be asked for."""


def wait_rpc(
    caller: Caller, api: str, operation: dict[str, Any], method: str, seconds: float | None = None
) -> dict[str, Any]:
    """Wait for an operation of TPU (`projects.locations.operations.get`) or Service Usage (`operations.get`).

    Waits for at most `seconds`, as `wait_compute`, and returns the operation's response. Raises OperationFailedError
    with the canonical gRPC code name as the reason, e.g. RESOURCE_EXHAUSTED; DEADLINE_EXCEEDED when it did not finish
    in time.
    """
    is_done = poll_rpc(caller, api, operation, method, seconds)
    while (done := is_done()) is None:
        caller.clock.sleep(caller.poll_seconds)
    return done


def poll_rpc(
    caller: Caller, api: str, operation: dict[str, Any], method: str, seconds: float | None
) -> Callable[[], dict[str, Any] | None]:
    """Return what tells the response of an operation, or None while it is not done; see `wait_rpc`."""
    late = caller.clock.deadline(OPERATION_SECONDS if seconds is None else seconds)
    answers = _answers(operation, lambda: caller.google.call(api, method, name=operation["name"]))

    def response() -> dict[str, Any] | None:
        found = next(answers)
        if not found.get("done") and not found.get("name", "").startswith(NOTHING_TO_DO):
            if late():
                raise _too_late(api, seconds)
            return None
        if error := found.get("error"):
            raise OperationFailedError(f"{api} operation", 0, code_name(error), error.get("message", ""))
        return found.get("response", {})

    return response


def _too_late(api: str, seconds: float | None) -> OperationFailedError:
    hint = "" if seconds is None else "; if it needs more time, raise tpu.create_timeout_minutes"
    late = f"not done after {OPERATION_SECONDS if seconds is None else seconds:.0f} s{hint}"
    return OperationFailedError(f"{api} operation", 0, "DEADLINE_EXCEEDED", late)


def delete_when_ready(caller: Caller, delete: Callable[[], object], seconds: float = OPERATION_SECONDS) -> None:
    """Call `delete`, again while Google refuses it for now; no error if what it deletes is gone."""
    late = caller.clock.deadline(seconds)
    while True:
        try:
            delete()
        except GoogleError as error:
            if error.is_gone:
                return
            if late() or not error.is_not_now:
                raise
            caller.clock.sleep(caller.poll_seconds)
        else:
            return


def code_name(status: dict[str, Any]) -> str:
    """Return the name of a google.rpc.Status's code, e.g. RESOURCE_EXHAUSTED; UNKNOWN without a code that has one."""
    from google.rpc import code_pb2  # protobuf takes 60 ms

    code = status.get("code")
    return code_pb2.Code.Name(code) if code in code_pb2.Code.values() else "UNKNOWN"
