"""A result that the bucket has not taken: kept on this machine until a verb that looks at its run can write it.

The file is written before the pod of a finished run is deleted, and removed once the bucket has the result. So neither
a bucket that does not answer nor a killed controller makes the run do its work twice.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from controller.context import Context
from controller.core.errors import CloudError
from controller.core.formats import dump, load
from controller.gcp.errors import GoogleError
from controller.records import index
from controller.records.ledger import Ledger, Result
from controller.records.spending import PodLifetime, write_ends

FILE = "kept_result.json"


class ResultNotRecordedError(CloudError):
    """The run has finished, and the bucket has not taken its result."""


def kept_file(state: Path, run_id: str) -> Path:
    return state / "runs" / run_id / FILE


def keep_result(state: Path, result: Result, lives: Sequence[PodLifetime]) -> None:
    """Keep a result, and the times of the run's pods as this controller knows them, on this machine."""
    file = kept_file(state, result.run_id)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = file.with_suffix(".draft")
    draft.write_text(dump({"result": result.to_json(), "pods": [life.to_json() for life in lives]}))
    draft.replace(file)


def record_result(ledger: Ledger, result: Result) -> Result:
    """Write the result of a run; return it with the seconds since the first launch that is on record."""
    launches = {launch.attempt: launch.time for launch in ledger.launches()}
    for lost in set(range(1, result.attempts + 1)) - set(launches):
        ledger.report(f"{ledger.launch_object(lost)} is missing")
    began = min([result.ended - result.seconds, *launches.values()])
    whole = replace(result, seconds=round(max(0.0, result.ended - began), 1))
    ledger.record_result(whole)
    return whole


def record_kept_result(context: Context, ledger: Ledger) -> None:
    """Write the result that this machine keeps of a run, if it keeps one; a bucket that refuses it again is noted.

    If the bucket has a result, or ends of the pods' times, those count.
    """
    file = kept_file(context.state_dir, ledger.run_id)
    if not file.is_file():
        return
    body = load(file.read_bytes(), str(file))
    try:
        write_ends(context.google, ledger.bucket, ledger.run_id, [PodLifetime.from_json(one) for one in body["pods"]])
        record_result(ledger, Result.from_json(body["result"]))
    except GoogleError as error:
        context.events.note(ledger.run_id, f"warning: its result is still only in {file}: {error}")
        return
    file.unlink(missing_ok=True)
    context.events.note(ledger.run_id, f"its result, which was kept in {file}, is on record")


def note_in_table(state: Path, result: Result) -> None:
    """Show the run as finished in this machine's table of runs."""
    row = {"run": result.run_id, "state": result.outcome, "ended": result.ended, "seconds": result.seconds}
    index.append_rows(state, [{**row, "attempts": result.attempts, "metrics": result.summary}])
