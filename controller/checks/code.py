"""Is what is shipped what is meant?"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema.config import Config
from controller.agent.commands.code import MAX_BYTES
from controller.core.finding import Finding
from controller.inputs.git import without_password


def repository_is_shipped(config: Config) -> Iterator[Finding]:
    """`program=trainer` ships slipway's own trainer, whatever repository is named."""
    if config.code.repository is not None and config.program.kind == "trainer":
        words = "program=trainer ships the bundled trainer; choose program=command, or take the repository out"
        yield Finding("repository_unused", "error", "code.repository", words)


def repository_has_no_password(config: Config) -> Iterator[Finding]:
    """The config is recorded with the results; git finds passwords by its credential helpers and by SSH."""
    url = config.code.repository.url if config.code.repository else ""
    if without_password(url) != url:
        words = "holds a password or token, which would be recorded; leave it to git's credential helper, or use SSH"
        yield Finding("repository_password", "error", "code.repository.url", words)


def exclusions_can_be_read(config: Config) -> Iterator[Finding]:
    """https://git-scm.com/docs/gitignore: a pattern that is none would exclude nothing, without a word."""
    import pathspec

    for pattern in config.code.exclude:
        try:
            pathspec.GitIgnoreSpec.from_lines([pattern])
        except ValueError:
            yield Finding("exclude", "error", "code.exclude", f"{pattern!r} is no pattern as in .gitignore")


def limit_is_within_reach(config: Config) -> Iterator[Finding]:
    """Workers unpack no more than this, so that a mistake does not fill their disks."""
    if config.code.max_mb > MAX_BYTES / 1e6:
        words = f"workers unpack at most {MAX_BYTES / 1e6:.0f} MB of code; what is larger is an asset"
        yield Finding("code_limit", "error", "code.max_mb", words)


CHECKS = (
    repository_is_shipped,
    repository_has_no_password,
    exclusions_can_be_read,
    limit_is_within_reach,
)
