"""What Hydra's launcher asks for: jobs of an app, and how to run them. The launcher writes it as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.core.formats import checked


@dataclass(frozen=True)
class Job:
    """One job of a multirun.

    Attributes:
        title: the overrides in which it differs from the others.
        words: the app's arguments on a worker.
        output: folder on this machine for the job's files.
    """

    title: str
    words: tuple[str, ...]
    output: Path


@dataclass(frozen=True)
class Request:
    """Jobs of one app.

    Attributes:
        folder: folder in which the app was started.
        app: how Python starts it there: `("app.py",)` or `("-m", "lab.app")`.
        jobs: the jobs; none: delete the pods that `keep` has left.
        own_folders: folders of the app's outputs on this machine, which are not shipped.
        given: Slipway's overrides.
        tpu: slice type; empty: that of the config.
        zone: zone of the pods; empty: that of the slice type.
        name: name of the runs; empty: derived from the app.
        keep: whether more jobs will follow, so that the pods stay.
        batches: what all batches of a sweeper have in common, so that they are one sweep; empty for a single batch.
        fetch_max_mb: largest output, in MB, that is copied to this machine.
        yes: whether to create billed resources without a prompt.
        take_over: whether to replace another controller of the same jobs.
    """

    folder: Path
    app: tuple[str, ...]
    jobs: tuple[Job, ...]
    own_folders: tuple[str, ...]
    given: tuple[str, ...]
    tpu: str
    zone: str
    name: str
    keep: bool
    batches: str
    fetch_max_mb: float
    yes: bool
    take_over: bool

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str) -> "Request":
        """Read a request. Raises ConfigError if another version of Slipway wrote it."""
        known = checked(dict(body), where)
        jobs = tuple(Job(job["title"], tuple(job["words"]), Path(job["output"])) for job in known.pop("jobs"))
        lists = {name: tuple(known.pop(name)) for name in ("app", "own_folders", "given")}
        return cls(folder=Path(known.pop("folder")), jobs=jobs, **lists, **known)
