"""Assets copied to the bucket before the program starts: datasets, weights and tokenizers."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from conf.schema.base import VOLATILE, LocalPath, Name, Strict

Kind = Literal["dataset", "model", "tokenizer"]
Fetcher = Literal["laptop", "pod"]
FetchOn = Annotated[Fetcher, BeforeValidator(lambda value: "laptop" if value in ("auto", "vm") else value, Fetcher)]
"""Records of runs have `auto` and `vm`, of when a VM could fetch."""
HUB = "hf://"
FileName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*$")]

HUB_SOURCE = re.compile(
    r"hf://(?P<type>datasets/)?(?P<repository>[\w.-]+/[\w.-]+?)(@(?P<revision>refs/(?:pr|convert)/[^/@]+|[^/@]+))?"
    r"(/(?P<pattern>.*))?"
)
HUB_NAME = re.compile(
    r"(?:hf:/*|(?:https?://)?(?:www\.)?(?:huggingface|hf)\.co/)?(?P<type>datasets/|models?/)?"
    r"(?P<name>(?![.~])[\w.-]+(?:/[\w.-]+)?)"
    r"(?:(?:[@:](?!/)|/(?:tree|blob|resolve|raw)/)(?P<revision>[\w.-]*))?(?:/(?P<file>[^?]*))?(?:\?.*)?",
    re.IGNORECASE | re.ASCII,
)
"""Ways to write the name of a repository of the Hub, and of a file in it: as source, as page, or alone."""
BUCKET_SOURCE = re.compile(r"gs://(?P<repository>[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9])(/(?P<pattern>.*))?")


class SourceAddress(NamedTuple):
    """Parts of `source`: a repository of the Hugging Face Hub, or a bucket, and which of its files.

    `kind`: `model` or `dataset` on the Hub, else `bucket`. `pattern` is a glob; `**` stands for everything.
    """

    kind: Literal["model", "dataset", "bucket"]
    repository: str
    revision: str | None
    pattern: str

    @property
    def folder(self) -> str:
        """The folder before the first wildcard, with a slash; files are named relative to it in the asset."""
        literal = re.split(r"[*?\[]", self.pattern, maxsplit=1)[0]
        return literal[: literal.rfind("/") + 1]


def parse_source(text: str) -> SourceAddress:
    """Return the parts of `source`. Raises ValueError if it is neither hf://… nor gs://…."""
    hub, bucket = HUB_SOURCE.fullmatch(text), BUCKET_SOURCE.fullmatch(text)
    found = hub or bucket
    if found is None or ".." in (found["pattern"] or "").split("/"):
        raise ValueError(
            f"source: {text!r} is neither hf://[datasets/]OWNER/NAME[@REVISION][/PATTERN] nor gs://BUCKET/PATTERN"
        )
    pattern = (found["pattern"] or "").lstrip("/")
    pattern = f"{pattern}**" if not pattern or pattern.endswith("/") else pattern
    if hub is None:
        return SourceAddress("bucket", found["repository"], None, pattern)
    return SourceAddress("dataset" if hub["type"] else "model", hub["repository"], hub["revision"], pattern)


class RemoteFile(Strict):
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]\S*$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(description="Expected SHA-256.")
    token_secret: str | None = Field(
        default=None,
        description="Name in env.secrets of the bearer token. null: HF_TOKEN for huggingface.co, else none.",
    )


class Asset(Strict):
    """Where an asset's files come from: the Hub or a bucket, this machine, the web, or a command that makes them."""

    source: Annotated[str | None, VOLATILE] = Field(
        default=None, description="hf://[datasets/]OWNER/NAME[@REVISION][/PATTERN], or gs://BUCKET/PATTERN."
    )
    path: Annotated[LocalPath | None, VOLATILE] = Field(default=None, description="Local file or folder.")
    files: Annotated[dict[FileName, RemoteFile] | None, VOLATILE] = Field(
        default=None, description="Files to download, by file name."
    )
    build: Annotated[tuple[str, ...] | None, VOLATILE] = Field(
        default=None, description="Command (list of words), run in the repository. It fills the folder {output}."
    )
    inputs: Annotated[tuple[str, ...], VOLATILE] = Field(
        default=(), description="Files and folders that the build reads, besides those named in the command."
    )
    fetch_on: Annotated[FetchOn | None, VOLATILE] = Field(
        default=None, description="Who fetches or builds this asset. null: assets.fetch_on."
    )

    @property
    def is_remote(self) -> bool:
        """Whether its files may come into the bucket without this machine."""
        return bool(self.files or self.build) or (self.source or "").startswith(HUB)

    @model_validator(mode="before")
    @classmethod
    def _prefer_path(cls, data: Any) -> Any:
        """Let a copy on this machine take the place of what an experiment would fetch or build."""
        if isinstance(data, dict) and data.get("path") is not None:
            return {
                key: value
                for key, value in data.items()
                if key not in ("source", "files", "build", "inputs", "fetch_on")
            }
        return data

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.source is not None) + (self.path is not None) + bool(self.files) + bool(self.build) != 1:
            raise ValueError(
                "set one of source (hf:// or gs://), path (local), files (downloads) or build (a command that makes "
                "the files); path takes the place of the others"
            )
        if self.source is not None:
            parse_source(self.source)
        if self.build and not any("{output}" in word for word in self.build):
            raise ValueError("build: must contain {output}, the folder that the command fills")
        if up := [name for name in self.files or () if {".", ".."} & set(name.split("/"))]:
            raise ValueError(f"files: {up[0]} is outside the asset's folder")
        return self


class Assets(Strict):
    """Assets to copy to the bucket. In the config, `assets://NAME/FILE` refers to an asset's copy."""

    datasets: dict[Name, Asset]
    models: dict[Name, Asset] = Field(description="Model weights.")
    tokenizers: dict[Name, Asset]
    fetch_on: Annotated[FetchOn, VOLATILE] = Field(
        description="Where hf:// and files are fetched and builds run. laptop: on this machine, before the TPU exists. "
        "pod: on worker 0 of the TPU."
    )

    def fetch_on_of(self, kind: Kind, name: str) -> Fetcher:
        """Return who is to fetch an asset; one that a run has on record may be in the config no more."""
        assets: dict[str, Asset] = getattr(self, f"{kind}s")
        return (assets[name].fetch_on if name in assets else None) or self.fetch_on

    def iter_assets(self) -> Iterator[tuple[Kind, str, Asset]]:
        """Yield every asset with its kind and name."""
        for name, asset in self.datasets.items():
            yield "dataset", name, asset
        for name, asset in self.models.items():
            yield "model", name, asset
        for name, asset in self.tokenizers.items():
            yield "tokenizer", name, asset
