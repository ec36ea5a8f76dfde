"""`slipway report`: write one HTML page about runs, a sweep or a single run (docs/report.md)."""

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from controller.cli.main import Command
from controller.cli.verbs.look.runs import requested_runs
from controller.core.clock import Clock
from controller.core.errors import ConfigError
from controller.core.layout import print_wrapped
from controller.core.text import plural
from controller.report.gather import FileReader, bucket_reader, gather_runs, local_reader
from controller.report.model import ReportModel, build_report
from controller.report.page import render
from controller.report.scaling import Scaling, measure_scaling
from controller.report.scaling_page import scaling_lines
from controller.report.summary import hypothesis_rows


def run(command: Command) -> int:
    flags = command.flags
    state, name, rows = requested_runs(command)
    with _file_reader(command, state) as read, command.options.showing("reading metrics and transcripts"):
        found = build_report(name, gather_runs(rows, read), flags.baseline)
    scaling = _scaling(found, flags)
    # not in the folder of the user's code by default: the page would be shipped, and make every run a new one
    file = Path(flags.output or state / "reports" / f"{name}.html")
    try:
        if not flags.output:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(render(found, Clock().now(), scaling), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; choose another file with -o FILE") from None
    if flags.json:
        more = {"scaling": scaling.to_json()} if scaling else {}
        print(json.dumps({"file": str(file), **found.to_json(), **more}, indent=1))
    else:
        what = f"{plural(len(found.settings), 'setting')}, {plural(len(found.runs), 'run')}"
        print_wrapped([f"{file}: {what}, {file.stat().st_size / 1e6:.1f} MB; open it in a browser"])
        print_wrapped((f"{name:<10}{text}" for name, text in hypothesis_rows(found)), indent=10)
        for line in scaling_lines(scaling) if scaling else ():
            print(line)
    return 0


def _scaling(report: ReportModel, flags: Namespace) -> Scaling | None:
    """Measure what --x asks for. Raises ConfigError."""
    if not flags.x:
        if given := [f"--{name}" for name in ("y", "fit", "level") if getattr(flags, name) not in ("", None)]:
            raise ConfigError(f"{given[0]}: needs --x, e.g. --x params")
        return None
    return measure_scaling(report, flags.x, flags.y, flags.fit, flags.level)


@contextmanager
def _file_reader(command: Command, state: Path) -> Iterator[FileReader]:
    """Yield a reader of this machine's files, or with --refresh of the bucket, for runs active or made elsewhere."""
    if not command.flags.refresh:
        yield local_reader(state)
        return
    from controller.cloud.connect import open_context, project_of
    from controller.plan.project import bucket_name

    config = command.options.cloud_config()
    with open_context(config) as (context, _):
        yield bucket_reader(context.google, bucket_name(config, project_of(config)), local_reader(state))
