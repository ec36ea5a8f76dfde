"""Runs `slipway` in processes that are forked, ready imported, and kill themselves before a request: see test_killed.

`python -m tests.scenarios.recovery.killing`, an order in JSON per line on stdin, an answer per line on stdout.
A request is one of Google's or one to the agent of a worker; which one is said by its kind and how many of that kind
went before.
"""

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.virtual_time import SharedTime, VirtualClock, live_in

TIMEOUT_SECONDS = 900.0
READS = re.compile(
    r"\.(get|list|getIamPolicy|batchGet|get_media|wait|getGuestAttributes|getBillingInfo|listManagedInstances|aggregatedList)$|"
    r"agent (observe|state|watch|watchdog_state)$"
)
"""Kinds of requests that change nothing."""
ID_PATTERN = re.compile(r"\d{8}T[\d.]+Z|[0-9a-f]{8,}|\d{4,}\S*(?=\.)")


def main() -> None:
    """Answers each order; a controller that stopped itself answers with its `pid`, and goes on when told to.

    Orders: {serve: state folder, agents: socket, home}, {home, argv, before: a request | null, log: a file | null,
    pause, goes_on} and {go_on: pid}. `goes_on`: earlier controllers of this home count, too.
    """
    _import_everything()
    served: list[int] = []
    for line in sys.stdin:
        order = json.loads(line)
        if "go_on" in order:
            os.kill(order["go_on"], signal.SIGCONT)
            print(json.dumps(_end(order["go_on"], 0)), flush=True)
            continue
        if pid := os.fork():
            if "serve" in order:
                served.append(pid)
            answer = {"code": None} if "serve" in order else _end(pid, os.WUNTRACED)
            print(json.dumps(answer), flush=True)
            continue
        code = 1
        try:
            code = _serve(order["serve"], order["agents"], order["home"]) if "serve" in order else _run(**order)
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    for pid in served:
        os.waitpid(pid, 0)


def _end(pid: int, options: int) -> dict[str, int | None]:
    """Wait for the exit code of a process, or with WUNTRACED for its stop."""
    status = os.waitpid(pid, options)[1]
    return {"code": None, "pid": pid} if os.WIFSTOPPED(status) else {"code": os.waitstatus_to_exitcode(status)}


def _import_everything() -> None:
    """What both programs would import, so that a fork has it; nothing here starts a thread."""
    import importlib

    from tests.emulators import preload

    for name in ("controller.cli.main", "controller.cli.verbs.up", "controller.ssh.fleet",
                 "controller.localcloud.cloud", "controller.ssh.worker_connection", "googleapiclient.discovery",
                 "googleapiclient.http", "google_auth_httplib2", "rich.console", "hydra", "tenacity",
                 "google.oauth2.service_account"):  # fmt: skip
        importlib.import_module(name)
    preload()
    assert threading.active_count() == 1


def time_of(home: str) -> SharedTime:
    """Return the time of the cloud and the controllers of a home."""
    return SharedTime(Path(home, "time"))


def _serve(state: str, agents: str, home: str) -> int:
    from controller.localcloud.__main__ import main as localcloud
    from tests.agents import ForkedAgents

    live_in(time_of(home))
    ForkedAgents(agents).install()
    os.setsid()
    Path(state).mkdir(parents=True)
    log = os.open(f"{state}/server.log", os.O_WRONLY | os.O_CREAT, 0o600)
    for standard, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(file, standard)
    return localcloud(["serve", f"--state={state}"])


def _run(
    home: str, argv: list[str], before: str | None, log: str | None, *, pause: bool = False, goes_on: bool = False
) -> int:
    """The command line, dead or stopped when it would make the request; all that it makes are logged otherwise."""
    from controller import connect, emulator, lease
    from controller.cli import main as cli

    os.environ["SLIPWAY_HOME"] = home
    written = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    words = os.open(f"{home}/words", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(words, 1)
    os.dup2(words, 2)
    _count_request(before, written, signal.SIGSTOP if pause else signal.SIGKILL, Path(home) if goes_on else None)
    connect.Clock = partial(VirtualClock, time_of(home))  # pyright: ignore[reportAttributeAccessIssue]
    # how often the lease is renewed, and requests for it are read, would depend on the machine's speed
    lease.RENEW_SECONDS = lease.REQUEST_SECONDS = TIMEOUT_SECONDS
    emulator.run_emulator_verb = lambda *_, **__: (0, "")  # it runs, and is stopped and wiped by who ordered it
    return cli.run(argv)


def _request_kind(api: str, method: str, parameters: dict[str, Any], *_: Any) -> str:
    """What is written is told apart by its name, without what differs from run to run."""
    name = parameters.get("name", "") if method == "objects.insert" else ""
    return f"{api} {method} {re.sub(ID_PATTERN, '*', name)}".rstrip()


def _count_request(before: str | None, log: int, number: int, life: Path | None) -> None:
    """Log each request with its number, and send a signal before one of them.

    Args:
        before: the request that is not made: `KIND NUMBER`, or `KIND after CHANGE`, the last request that changes.
        log: file that the others are written to.
        number: of the signal.
        life: home whose earlier controllers have made requests, too: a change that one of them made is made again only
            by name. Those of leases, which each controller makes, count anew.
    """
    from controller.gcp.client import GoogleClient
    from controller.gcp.google_errors import GoogleError
    from controller.ssh.connection import Connection

    file = life / "made" if life is not None else None
    made = file.read_text().splitlines() if file is not None and file.exists() else []
    seen, lock, last_change = Counter(made), threading.Lock(), ""

    def about_to(kind: str) -> None:
        nonlocal last_change
        with lock:
            seen[kind] += 1
            request = f"{kind} {seen[kind]}"
            if before in (request, f"{kind} after {last_change}"):
                # to this thread: another one that is to stop all first has to run, and this one would go on meanwhile
                signal.pthread_kill(threading.get_ident(), number)
            os.write(log, f"{request}\n".encode())
            last_change = last_change if READS.search(kind) else kind
            if file is not None and not READS.search(kind) and "lease" not in kind:
                with file.open("a") as out:
                    out.write(f"{kind}\n")

    refused = set[str]()

    def counted(method: Any, kind: Callable[..., str]) -> Any:
        def act(self: Any, *arguments: Any, **more: Any) -> Any:
            what = kind(*arguments)
            if what not in refused:  # else it is the same request once more: how often Google refuses it differs
                about_to(what)
            refused.discard(what)
            try:
                return method(self, *arguments, **more)
            except GoogleError:
                refused.add(what)
                raise

        return act

    GoogleClient._execute_once = counted(GoogleClient._execute_once, _request_kind)
    Connection._agent_output = counted(Connection._agent_output, lambda command, *_: f"agent {command}")
    Connection._install_agent = counted(Connection._install_agent, lambda *_: "agent upload")


if __name__ == "__main__":
    main()
