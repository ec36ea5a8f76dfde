"""Worker process for episodes: `python -m trainer.environments.worker SETTINGS`; reads and writes JSON lines.

A request names an episode by id, with its row and all of its responses so far. The process keeps the objects of
episodes that go on; one that it does not have is repeated from the row and the responses.
"""

import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from conf.environment import ENVIRONMENT_METHODS, ROLES, TOOLS
from conf.environment import Environment as Episode
from conf.formats import RunFileError
from conf.schema.training.loop_parts import Environment
from trainer.environments import verifiers_env
from trainer.environments.failure import FailureError
from trainer.extension import add_modules, load_extension
from trainer.rewards.process import cpu_time_limit, file_size_limit, install_limits


def check_class(settings: Environment) -> None:
    """Raise RunFileError if the class is missing or does not fit. An environment of verifiers is not imported."""
    if settings.verifiers_module is not None:
        verifiers_env.check_installed(settings.verifiers_module)
        verifiers_env.check_box(settings)
    else:
        load_class(settings)


def load_class(settings: Environment) -> Callable[[], Episode]:
    """Return a function that makes one episode. Raises RunFileError if the class is missing or does not fit."""
    assert settings.reference is not None
    if settings.verifiers_module is not None:
        return verifiers_env.load_episodes(settings)
    made = load_extension("environment", settings.reference, "loop.environment.name", settings.options)
    found = getattr(made, "func", made)
    for name in ENVIRONMENT_METHODS:
        if not callable(getattr(found, name, None)):
            raise RunFileError(f"loop.environment.name: environment {settings.name} has no method {name}")
    return made


class EpisodeServer:
    """Answers requests in one process.

    A reply has text, messages (None if it says a text), done, reward (None while the episode goes on) and metrics; or
    failure and reason.
    """

    def __init__(self, settings: Environment, make: Callable[[], Episode]) -> None:
        self._settings, self._make = settings, make
        self._most = int(settings.max_output_mib * 2**20)
        self._live: dict[str, tuple[Episode, list[str]]] = {}

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer {id, row, responses, final}. final: the episode ends here, so its reward is wanted."""
        try:
            return self._advance(**request)
        except FailureError as error:
            self._live.pop(request["id"], None)
            return {"failure": error.args[0], "reason": error.args[1]}

    def _advance(self, id: str, row: dict[str, Any], responses: list[str], *, final: bool) -> dict[str, Any]:
        environment, seen = self._live.pop(id, (None, []))
        begins = environment is None or seen != responses[: len(seen)]
        if begins:
            with self._limited():
                environment, seen = self._make(), []
        assert environment is not None
        try:
            said, done = {"text": "", "messages": None}, False
            if begins:
                with self._limited():
                    said = self._checked_turn(environment.reset(row))
            for response in responses[len(seen) :]:
                with self._limited():
                    said, done = self._checked_step(environment.step(response))
            if not (done or final):
                if responses:
                    self._live[id] = environment, responses
                return {**said, "done": False, "reward": None, "metrics": {}}
            return {**said, "done": done, **self._score(environment)}
        finally:
            if id not in self._live and callable(close := getattr(environment, "close", None)):
                with self._limited():
                    close()

    def _score(self, environment: Episode) -> dict[str, Any]:
        with self._limited():
            reward, metrics = float(environment.reward()), getattr(environment, "metrics", dict)()
            metrics = {str(name): float(value) for name, value in metrics.items()}
        for name, value in {"the reward": reward, **metrics}.items():
            if not math.isfinite(value):
                raise FailureError("not_finite", f"{name} is {value}")
        return {"reward": reward, "metrics": metrics}

    def _checked_turn(self, said: Any) -> dict[str, Any]:
        """Return text and messages of what reset or step says."""
        if not isinstance(said, list):
            return {"text": self._checked_text(said), "messages": None}
        if not all(isinstance(turn, tuple | list) and len(turn) == 2 for turn in said):
            raise FailureError("error", f"messages must be pairs of role and text, not {said!r:.100}")
        turns = [(self._checked_text(role), self._checked_text(text)) for role, text in said]
        for place, (role, text) in enumerate(turns):
            if role not in ROLES and (role != TOOLS or place):
                words = f"the role of a message is {', '.join(ROLES)} or, of the first one, {TOOLS}"
                raise FailureError("error", f"{words}, not {role!r:.100}")
            if role == TOOLS and not isinstance(_parsed(text), list):
                raise FailureError("error", f"a message of {TOOLS} must be a JSON list of functions, not {text!r:.100}")
        return {"text": "\n".join(text for _, text in turns), "messages": turns}

    def _checked_text(self, text: Any) -> str:
        if not isinstance(text, str):
            raise FailureError("error", f"reset and step must return text, not {text!r:.100}")
        if len(text) > self._most:
            raise FailureError(
                "output", f"{len(text):,} characters in a text, more than loop.environment.max_output_mib"
            )
        return text.encode(errors="replace").decode()  # half surrogates have no UTF-8

    def _checked_step(self, returned: Any) -> tuple[dict[str, Any], bool]:
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise FailureError("error", f"step must return (text, done), not {returned!r:.100}")
        return self._checked_turn(returned[0]), bool(returned[1])

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Run code of the environment under the limits, and name what goes wrong."""
        sys.stdout.flush()
        os.lseek(1, 0, os.SEEK_SET)
        os.ftruncate(1, 0)
        try:
            with (
                file_size_limit(self._most),
                cpu_time_limit(self._settings.timeout_seconds, self._settings.wall_seconds),
            ):
                yield
                sys.stdout.flush()
        except MemoryError:
            raise FailureError("memory", "it ran out of memory (loop.environment.max_memory_gib)") from None
        except (Exception, SystemExit) as error:
            if isinstance(error, FailureError):
                raise
            raise FailureError("error", " ".join(traceback.format_exception_only(error)[-1].split())[:500]) from None


def _loaded(settings: Environment) -> Callable[[], Episode]:
    """Return a function that makes one episode. What fails in the import fails each episode, where it is named."""
    try:
        return load_class(settings)
    except Exception as error:
        failure = error

        def fail() -> NoReturn:
            raise failure

        return fail


def _parsed(text: str) -> Any:
    """Return the content of JSON, None for a text that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def main() -> None:
    """Answer requests until the pipe closes. What environments print goes to a file that is never read."""
    settings = Environment(**json.loads(sys.argv[1]))
    add_modules()
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    with tempfile.TemporaryFile() as discarded, open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
        os.dup2(discarded.fileno(), 1)
        os.dup2(discarded.fileno(), 2)
        sys.dont_write_bytecode = True  # a file of it may be larger than the limit
        install_limits(int(settings.max_memory_gib * 2**30))
        server = EpisodeServer(settings, _loaded(settings))
        for line in requests:
            print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
