"""`python -m tests.witness FOLDER`: replay a recording of `slipway witness` against the emulated cloud.

Prints every difference and exits with 1 if there are any, else with 0; with 2 if the folder holds no recording.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.core.json_documents import FormatError
from controller.localcloud import lifecycle
from controller.localcloud.http.call import PROJECT_NUMBER
from controller.witness.recording import REQUESTS, RequestLine
from tests.controller.localcloud.harness import EmulatedCloud, run_localcloud
from tests.witness.replay import Replayer, Report, Send

OPERATION_SECONDS = 0.3
WAIT_SECONDS = 20.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.witness", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder that `slipway witness` wrote")
    parser.add_argument("--notes", action="store_true", help="also print what was not judged")
    given = parser.parse_args(arguments)
    try:
        lines = load(given.folder)
    except (OSError, ValueError, KeyError, FormatError) as error:
        print(f"error: {given.folder} holds no recording: {error}", file=sys.stderr)
        return 2
    with running_cloud(start_fresh) as cloud:
        report = replay(lines, cloud)
    for found in sorted(map(str, report.differences.values())):
        print(found)
    for note in report.notes if given.notes else ():
        print(f"note: {note}")
    print(f"{len(lines)} recorded requests, {report.sent} sent, {len(report.differences)} differences")
    return 1 if report.differences else 0


def start_fresh(cloud: EmulatedCloud) -> None:
    """Start a cloud whose project is new: no API is on, unlike after `cloud.start`."""
    done = run_localcloud("start", cloud.state, f"--operation-seconds={OPERATION_SECONDS}")
    assert done.returncode == 0, done.stderr


def load(folder: Path) -> list[RequestLine]:
    """The requests of a recording, in the order in which they began."""
    text = (folder / REQUESTS).read_text().splitlines()
    return sorted((RequestLine.from_json(json.loads(line), REQUESTS) for line in text), key=lambda line: line.number)


def replay(lines: list[RequestLine], cloud: EmulatedCloud, wait: float = WAIT_SECONDS) -> Report:
    """Replay a recording in a cloud that nobody has used before."""
    project = cloud.endpoint["project"]
    replayer = Replayer(lines, sender(cloud), project, PROJECT_NUMBER, wait=wait, operation=OPERATION_SECONDS)
    return replayer.run()


def sender(cloud: EmulatedCloud) -> Send:
    roots = cloud.endpoint["roots"]

    def send(api: str, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, Any]:
        status, content, _ = cloud.send(method, roots[api] + path, body, headers)
        try:
            return status, json.loads(content) if content else None
        except ValueError:
            return status, None

    return send


@contextmanager
def running_cloud(start: Callable[[EmulatedCloud], object]) -> Iterator[EmulatedCloud]:
    """An emulated cloud with nothing in it, which is wiped at the end."""
    with tempfile.TemporaryDirectory(prefix="slipway-witness-") as folder:
        cloud = EmulatedCloud(Path(folder) / "state")
        start(cloud)
        try:
            yield cloud
        finally:
            lifecycle.wipe(cloud.state)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
