"""Assets copied to the bucket before the program starts: datasets, weights and tokenizers."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from conf.schema.base import VOLATILE, Name, Strict

Kind = Literal["dataset", "model", "tokenizer"]
FileName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*$")]


class RemoteFile(Strict):
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]\S*$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(description="Expected SHA-256.")
    token_secret: str | None = Field(
        default=None,
        description="Name in env.secrets of the bearer token. null: HF_TOKEN for huggingface.co, else none.",
    )


class Asset(Strict):
    """A local path, files to download, or a command that makes them. The content identifies a run, not its source."""

    path: Annotated[str | None, VOLATILE] = Field(default=None, description="Local file or folder.")
    files: Annotated[dict[FileName, RemoteFile] | None, VOLATILE] = Field(
        default=None, description="Files to download, by file name."
    )
    build: Annotated[tuple[str, ...] | None, VOLATILE] = Field(
        default=None, description="Command (list of words), run in the repository. It fills the folder {output}."
    )
    inputs: Annotated[tuple[str, ...], VOLATILE] = Field(
        default=(), description="Files and folders that the build reads, besides those named in the command."
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is not None) + bool(self.files) + bool(self.build) != 1:
            raise ValueError(
                "set exactly one of path (local), files (downloads) or build (a command that makes the files)"
            )
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
    fetch_on: Annotated[Literal["laptop", "pod"], VOLATILE] = Field(
        description="Where `files` are downloaded. laptop: this machine, before the TPU exists. pod: worker 0."
    )

    def iter_assets(self) -> Iterator[tuple[Kind, str, Asset]]:
        """Yield every asset with its kind and name."""
        for name, asset in self.datasets.items():
            yield "dataset", name, asset
        for name, asset in self.models.items():
            yield "model", name, asset
        for name, asset in self.tokenizers.items():
            yield "tokenizer", name, asset
