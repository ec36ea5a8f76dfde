"""Wait for Google's long-running operations and raise their errors as exceptions.

Compute: https://cloud.google.com/compute/docs/api/how-tos/api-requests-responses; TPU and Service Usage:
https://google.aip.dev/151.
"""

from typing import Any, Protocol

from controller.core.clock import Clock
from controller.gcp.client import GoogleClient
from controller.gcp.errors import GoogleError


class Caller(Protocol):
    """Context of a caller that waits; `poll_seconds` is in seconds between polls."""

    google: GoogleClient
    clock: Clock
    project: str
    poll_seconds: float


class OperationFailedError(GoogleError):
    """An operation that was accepted and then failed; `status` is 0."""


def wait_compute(caller: Caller, operation: dict[str, Any]) -> None:
    """Wait for a Compute operation, of any scope. Raises OperationFailedError with Compute's error code as reason."""
    where: dict[str, str] = {"project": caller.project, "operation": operation["name"]}
    method = "globalOperations.wait"
    for scope in ("region", "zone"):
        if operation.get(scope):
            where[scope] = operation[scope].rsplit("/", 1)[-1]
            method = f"{scope}Operations.wait"
    while operation.get("status") != "DONE":
        operation = caller.google.call("compute", method, **where)
    errors = operation.get("error", {}).get("errors", [])
    if errors:
        what = f"compute {operation.get('operationType', 'operation')}"
        raise OperationFailedError(what, 0, errors[0].get("code", "ERROR"), errors[0].get("message", ""))


def wait_rpc(
    caller: Caller, api: str, operation: dict[str, Any], method: str, seconds: float = float("inf")
) -> dict[str, Any]:
    """Wait for an operation of TPU (`projects.locations.operations.get`) or Service Usage (`operations.get`).

    Waits for at most `seconds` and returns the operation's response.

    Raises:
        OperationFailedError: with the canonical gRPC code name as the reason, e.g. RESOURCE_EXHAUSTED;
            DEADLINE_EXCEEDED when it did not finish in time.
    """
    late = caller.clock.deadline(seconds)
    while not operation.get("done"):
        if late():
            message = f"not done after {seconds:.0f} s; if it needs more time, raise tpu.create_timeout_minutes"
            raise OperationFailedError(f"{api} operation", 0, "DEADLINE_EXCEEDED", message)
        caller.clock.sleep(caller.poll_seconds)
        operation = caller.google.call(api, method, name=operation["name"])
    error = operation.get("error")
    if error:
        raise OperationFailedError(f"{api} operation", 0, code_name(error), error.get("message", ""))
    return operation.get("response", {})


def code_name(status: dict[str, Any]) -> str:
    """Return the name of a google.rpc.Status's code, e.g. RESOURCE_EXHAUSTED; UNKNOWN without a code that has one."""
    from google.rpc import code_pb2  # protobuf takes 60 ms

    code = status.get("code")
    return code_pb2.Code.Name(code) if code in code_pb2.Code.values() else "UNKNOWN"
