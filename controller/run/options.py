"""Options of a caller: which run, and how to drive it. The command line and `controller.api` both fill this in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from controller.config.compose import compose, sound, with_overrides
from controller.core.errors import ConfigError
from controller.core.events import Waiting, silent_wait
from controller.core.text import width_of, wrap
from controller.core.this_process import state_home

if TYPE_CHECKING:  # a command that composes nothing need not load the schema
    from conf.schema.config import Config
    from conf.schema.problems import ConfigProblem
    from controller.core.finding import Finding


@dataclass(frozen=True)
class RunOptions:
    """Selects a run and how to drive it. Nothing here enters the config or the run's identity."""

    overrides: tuple[str, ...] = ()
    """Overrides in Hydra's syntax: `key=value` and `+experiment=NAME`."""
    run_id: str = ""
    """Id of a recorded run; the overrides then say where its record is and how to execute it."""
    meant: str = ""
    """Id of the run that the overrides meant when it was launched: a verb that looks or ends means it still."""
    plan_file: Path | None = None
    """A config written by `plan --save`; the overrides are applied to it."""
    yes: bool = False
    """Create, replace and delete without a prompt."""
    detach: bool = False
    """Return once the program has started."""
    queue: bool = False
    """Wait while another run uses the pod."""
    take_over: bool = False
    """Take over from the controller that holds the lease."""
    trust: bool = False
    """Execute what a record of another machine holds without a prompt."""
    json: bool = False
    """Print JSON lines, and never ask."""
    waiting: Waiting = silent_wait
    """Shows what is being done until the plan and its cloud are open."""

    def __post_init__(self) -> None:
        if self.run_id and self.plan_file is not None:
            raise ConfigError("--run and --plan are two sources of a config: give one of them")

    @contextmanager
    def showing(self, text: str) -> Iterator[Callable[[str], object]]:
        """Show what is being done while the context is open; call its value when that changes."""
        with self.waiting() as doing:
            doing(text)
            yield doing

    @property
    def state_dir(self) -> Path:
        """Return the state folder; without overrides nothing is composed, which would take longer than reading it."""
        if self.overrides:
            return Path(self.cloud_config().run.state_dir).expanduser()
        return state_home()

    def config(self, *, resolve: bool = True) -> tuple[Config, list[Finding]]:
        """Return the composed config and the findings of the preflight checks.

        Raises ConfigError with every problem if the config is unusable, those between sections included.

        Args:
            resolve: replace the weights of another run, `run:ID`, by the path of its checkpoint.
        """
        from controller.checks.preflight import preflight
        from controller.config.own_files import overruled
        from controller.core.finding import Finding

        config, problems = self._compose()
        findings = preflight(config) if config else []
        if config is None or problems:
            raise ConfigError([*problems, *(f for f in findings if f.severity == "error")])
        if self.plan_file is None:
            found = overruled(Path.cwd() / "slipway", self.overrides)
            findings += [Finding("unread", "warning", key, said) for key, said in found.items()]
        if resolve and config.model is not None and (config.model.weights or "").startswith("run:"):
            from controller.records.run_weights import with_resolved_weights

            config = with_resolved_weights(config)
        return config, findings

    def cloud_config(self) -> Config:
        """Return the config for an operation that needs the cloud but no program: a missing program is no error.

        Raises ConfigError if the schema finds a problem.
        """
        return sound(self._compose())

    def checked_config(self, without: Set[str] = frozenset(), *, resolve: bool = True) -> Config:
        """Return the config for an operation that changes something, and print the warnings of the preflight checks.

        Raises ConfigError if some check finds an error.

        Args:
            without: ids of checks to skip.
            resolve: as in `config`.
        """
        config, findings = self.config(resolve=resolve)
        findings = [f for f in findings if f.check not in without]
        if errors := [f for f in findings if f.severity == "error"]:
            raise ConfigError(errors)
        for finding in findings:
            print(wrap(f"{finding.severity}: {finding}", width_of(sys.stderr), 2), file=sys.stderr)
        return config

    def _compose(self) -> tuple[Config | None, list[ConfigProblem]]:
        """Compose the config of the overrides, or apply them to the config of the plan file."""
        if self.plan_file is not None:
            from conf.schema.validation import validate
            from controller.records.plan_file import load_planned_config

            if chosen := [word for word in self.overrides if "." not in word.partition("=")[0]]:
                raise ConfigError(f"{', '.join(chosen)}: the file of --plan has its experiment and groups already")
            return validate(with_overrides(load_planned_config(self.plan_file), self.overrides))
        return compose(self.overrides, extra_dir=Path.cwd() / "slipway")
