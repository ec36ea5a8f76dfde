"""Hugging Face and sources: what the plan downloads can be read with your token, before anything is billed."""

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from conf.schema.assets import parse_source
from controller.context import Context, format_size
from controller.core.errors import ConfigError
from controller.core.finding import Issue, check
from controller.core.text import plural
from controller.gcp.google_errors import NoCredentialsError, ServiceDisabledError
from controller.inputs.download import token_for
from controller.inputs.hub_sources import (
    HUGGING_FACE,
    LOG_IN,
    PUBLIC_FILES,
    REFUSALS,
    HubQuestion,
    SourceError,
    error_status,
    explain,
    hub_endpoint,
    list_source,
    lookup_problem,
    require_readable,
)
from controller.inputs.resolved_assets import ResolvedAsset
from controller.plan.build import Plan, missing_assets
from controller.plan.worker_steps import describe_fetch, fetched_on_pod
from controller.resources.uploads.source_assets import HUB_TOKEN, THREADS, hub_access, list_objects

TIMEOUT_SECONDS = 10.0
COMMANDS = ("hf", "huggingface-cli")
REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
TYPES = ("model", "dataset", "space")
FLAGS = (
    *("--dry-run", "--no-dry-run", "--force-download", "--no-force-download", "--resume-download"),
    *("--quiet", "-q", "--json"),
)
"""Options of `hf download` without a value."""
PATTERNS = ("--include", "--exclude")
"""Options that take one value with `hf`, and any number with `huggingface-cli`."""
OPERATORS = "&|;()\n"
"""Characters that end a command in a shell."""
REDIRECTION = re.compile(r"\d*[<>]")
DUPLICATED_DESCRIPTOR = re.compile(r"\d*[<>]&[\d-]+")
COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
EXPANDED = re.compile(r"[$`*?\[{}<>]")
"""Characters of a word that a shell may replace by others."""


class HubSource(NamedTuple):
    """A repository on the Hub, or one of its files.

    `token`: None is the one that `hf` uses; empty is none. `log_in`: how to give the download a token. `certain`: false
    if a script for a shell names it, which may never run the command, or run it with other variables.
    """

    key: str
    repo_type: str
    repository: str
    revision: str | None
    file: str | None
    token: str | None
    log_in: str
    include: tuple[str, ...] = ()
    local: Path | None = None
    certain: bool = True

    def includes(self, name: str) -> bool:
        """Return whether the download has this file of the repository."""
        if self.file is not None:
            return name == self.file
        return not self.include or any(fnmatch(name, pattern) for pattern in self.include)


@check(
    "hugging_face",
    "error",
    "assets.KIND.NAME.build",
    "assets.KIND.NAME.files.FILE.url",
    also=("warning", "note"),
    of_plan=True,
)
def hub_sources_can_be_read(plan: Plan, context: Context) -> Iterator[Issue]:
    """Gated weights need a token and an accepted license. Without them, a download fails after `up` has started, with
    `assets.fetch_on=pod` on a billed pod. What a script would download is a warning, a network that does not answer a
    note.
    """
    for source in hub_sources(plan, context):
        yield from _ask(source)


def hub_sources(plan: Plan, context: Context) -> list[HubSource]:
    """Return what the plan has yet to download from the Hub."""
    return list(dict.fromkeys(_sources(plan, context)))


def download_bytes(source: HubSource) -> int | None:
    """Return the size of a download; None if the Hub does not tell."""
    if lookup_problem(hub_endpoint()):
        return None  # `hugging_face` reports it
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - httpx's

    api = HfApi(endpoint=hub_endpoint(), token=(get_token() if source.token is None else source.token) or False)
    where = {"repo_type": source.repo_type, "revision": source.revision, "timeout": TIMEOUT_SECONDS}
    try:
        described = api.repo_info(source.repository, **where, files_metadata=True)
    except (HTTPError, OSError, ValueError):
        return None  # `hugging_face` reports it
    listed = [item for item in getattr(described, "siblings", None) or [] if source.includes(item.rfilename)]
    return sum(item.size or 0 for item in listed)


def _sources(plan: Plan, context: Context) -> Iterator[HubSource]:
    secrets = None
    for asset in missing_assets(plan, context):
        key = f"assets.{asset.path}"
        if asset.recipe is not None and not asset.recipe.output.is_dir():
            try:
                token = build_token(plan, context, asset)
            except (ConfigError, ServiceDisabledError):
                continue  # another check reports it
            for source in _downloads_of(f"{key}.build", asset.recipe.argv):
                own = source.token is None and token is not None
                yield source._replace(token=token, log_in=LOG_IN) if own else source
        for file in asset.files:
            found = hub_file(file.url or "")
            if found is not None and not file.local.is_file():
                secrets = known_secrets(plan, context) if secrets is None else secrets
                token = token_for(file, secrets) or ""
                yield HubSource(f"{key}.files.{file.name}.url", *found, token, LOG_IN, local=file.local)


def build_token(plan: Plan, context: Context, asset: ResolvedAsset) -> str | None:
    """Return the token that a build finds; None is the one that `hf` uses here, empty is none.

    On the pod it has the secrets, on this machine what any command has. Raises ConfigError and ServiceDisabledError.
    """
    if not fetched_on_pod(plan.config, asset):
        return None
    plan.vault.load(context.google)
    return plan.vault.values().get(HUB_TOKEN) or (None if plan.config.cloud.kind == "here" else "")


def known_secrets(plan: Plan, context: Context) -> dict[str, str]:
    """Return the secrets of a plan by their names; none if they cannot be read."""
    try:
        plan.vault.load(context.google)
    except (ConfigError, ServiceDisabledError):
        return {}  # another check reports it
    return plan.vault.values()


def free_here(plan: Plan) -> tuple[Path, int]:
    """Return the state folder, to which files are downloaded, and the free bytes of its disk."""
    folder = Path(plan.config.run.state_dir).expanduser()
    return folder, shutil.disk_usage(folder if folder.is_dir() else Path.home()).free


def hub_file(url: str) -> tuple[str, str, str, str] | None:
    """Return (type, repository, revision, file) of a file on the Hub; None for another URL."""
    for endpoint in (hub_endpoint(), f"https://{HUGGING_FACE}"):
        pattern = rf"{re.escape(endpoint)}/(?:(dataset|space)s/)?({REPOSITORY.pattern})/resolve/([^/?]+)/([^?]+)"
        if found := re.match(pattern, url):
            return found[1] or "model", found[2], found[4], found[5]
    return None


def _downloads_of(key: str, argv: Sequence[str]) -> Iterator[HubSource]:
    """Yield what a command downloads with `hf download`, which may be inside a line for a shell."""
    for word in argv:
        if len(word.split()) > 1:
            try:
                words = _split_script(word)
            except ValueError:
                continue  # the shell will say what is wrong with it
            yield from (source._replace(certain=False) for source in _downloads_of(key, words))
    for i, word in enumerate(argv[:-1]):
        if Path(word).name in COMMANDS and argv[i + 1] == "download":
            yield from _parse_command(key, Path(word).name, argv[i + 2 :])


def _split_script(script: str) -> list[str]:
    """Split a script into words and operators such as `&&`. Raises ValueError if a quote is not closed."""
    text = COMMENT.sub("", script.replace("\\\n", ""))
    lexer = shlex.shlex(DUPLICATED_DESCRIPTOR.sub("", text), posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    return list(lexer)


def _parse_command(key: str, program: str, words: Sequence[str]) -> Iterator[HubSource]:
    """Yield the source of one command; nothing if its repository, revision or token is known to the shell only."""
    positional, options, include = list[str](), dict[str, str](), list[str]()
    takes_more = ""
    rest = iter(words)
    for word in rest:
        if (word and not word.strip(OPERATORS)) or REDIRECTION.match(word):
            break
        name, has_value, value = word.partition("=")
        if word.startswith("-"):
            takes_more = name if name in PATTERNS and program != "hf" and not has_value else ""
            if takes_more or name in FLAGS:
                continue
            options[name] = value if has_value else next(rest, "")
            include += [options[name]] if name == "--include" else []
        elif takes_more:
            include += [word] if takes_more == "--include" else []
        else:
            positional.append(word)
    repo_type = options.get("--repo-type", options.get("--type", "model"))
    revision, token = options.get("--revision"), options.get("--token") or None
    if any(EXPANDED.search(value) for value in (revision, token) if value):
        return
    if positional and REPOSITORY.fullmatch(positional[0]) and repo_type in TYPES:
        file = positional[1] if len(positional) > 1 else None
        if file is not None and EXPANDED.search(file):  # a pattern; a variable matches no file, its size is not known
            file, include = None, [file]
        elif file is not None and file.endswith("/"):
            file = None
        log_in = "pass it with --token" if token else "`hf auth login`"
        yield HubSource(key, repo_type, positional[0], revision, file, token, log_in, tuple(include))


def _ask(source: HubSource) -> Iterator[Issue]:
    """Ask the Hub for metadata, as the download will."""
    endpoint, what = hub_endpoint(), f"{source.repo_type} {source.repository}"
    if problem := lookup_problem(endpoint):
        yield Issue(f"was not checked: {what}: {problem}", source.key, "note")
        return
    from huggingface_hub import HfApi, get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - httpx's

    token = (get_token() if source.token is None else source.token) or False
    api = HfApi(endpoint=endpoint, token=token)
    where = {"repo_type": source.repo_type, "revision": source.revision}
    try:
        file = source.file
        if file is None:  # the description of a gated repository is public, its files are not
            described = api.repo_info(source.repository, **where, timeout=TIMEOUT_SECONDS)
            listed = getattr(described, "siblings", None) or []
            file = next((item.rfilename for item in listed if item.rfilename not in PUBLIC_FILES), None)
        if file is not None:
            url = hf_hub_url(source.repository, file, **where, endpoint=endpoint)
            get_hf_file_metadata(url, token=token, timeout=TIMEOUT_SECONDS, endpoint=endpoint)
    except (HTTPError, OSError, ValueError) as error:
        asked = (source.repo_type, source.repository, source.revision, source.file)
        message = explain(HubQuestion(*asked, endpoint, bool(token), source.log_in), error)
        if error_status(error) in REFUSALS:
            yield Issue(message, source.key, None if source.certain else "warning")
        else:
            yield Issue(f"was not checked: {message}", source.key, "note")


@check("source", "error", "assets.KIND.NAME.source", also="note", of_plan=True)
def sources_can_be_read(plan: Plan, context: Context) -> Iterator[Issue]:
    """A repository that is gated, absent or without such a file would end a fetch of hours. A Hub that
    does not answer is a note.
    """
    for asset in missing_assets(plan, context):
        if asset.source is None:
            continue
        key = f"assets.{asset.path}.source"
        try:
            yield from _questions(plan, context, asset, key)
        except SourceError as error:
            yield Issue(str(error), key) if error.permanent else Issue(f"was not checked: {error}", key, "note")


def _questions(plan: Plan, context: Context, asset: ResolvedAsset, key: str) -> Iterator[Issue]:
    source = asset.source or ""
    address = parse_source(source)
    if address.kind == "bucket":
        if plan.config.cloud.kind == "here":
            yield Issue(f"{source} is in a bucket, which cloud=here does not reach; use path, or hf://", key)
            return
        try:
            list_objects(context.google, address)
        except (NoCredentialsError, ServiceDisabledError):
            return  # another check reports it
        return
    try:
        plan.vault.load(context.google)
    except (ConfigError, ServiceDisabledError):
        return  # another check reports it
    endpoint = hub_endpoint()
    if endpoint.startswith("https:") and (problem := lookup_problem(endpoint)):  # before the Hub's library is imported
        raise SourceError(f"{address.repository}: {problem}", permanent=False)
    access = hub_access(plan.vault)
    commit, files = list_source(address, access)
    require_readable(address, commit, files, access)
    folder, free = free_here(plan)
    size = sum(file.size for file in files)
    most = sum(sorted((file.size for file in files), reverse=True)[:THREADS])
    if most > free and not fetched_on_pod(plan.config, asset):
        message = f"its {THREADS} largest files take {format_size(most)}; {folder} has {format_size(free)} free"
        yield Issue(f"{message}. Free some, or set run.state_dir to a folder on a larger disk", key)
    how = describe_fetch(plan.config, asset, size, context.clock.now())
    yield Issue(f"{plural(len(files), 'file')}, {format_size(size)}, of commit {commit[:12]}: {how}", key, "note")
