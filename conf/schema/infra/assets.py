"""What is copied to the bucket before the program starts: datasets, weights, tokenizers."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from conf.schema.base import VOLATILE, Name, Strict

Kind = Literal["dataset", "model", "tokenizer"]
FileName = Annotated[str, StringConstraints(pattern=r"^[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*$")]


class RemoteFile(Strict):
    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]\S*$")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(description="refused if it differs")
    token_secret: str | None = Field(
        default=None,
        description="name in env.secrets of what is sent as bearer token; null: HF_TOKEN to huggingface.co, else none",
    )


class Asset(Strict):
    """A local path, files to download, or a command that makes them. What counts for a run is what, not where."""

    path: Annotated[str | None, VOLATILE] = Field(default=None, description="a local file or folder")
    files: Annotated[dict[FileName, RemoteFile] | None, VOLATILE] = Field(
        default=None, description="file name: where it is fetched"
    )
    build: Annotated[tuple[str, ...] | None, VOLATILE] = Field(
        default=None, description="argument list, run in the repository; {output} in it is the folder that it fills"
    )
    inputs: Annotated[tuple[str, ...], VOLATILE] = Field(
        default=(), description="files and folders that the build reads, beside those that its words name"
    )

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.path is not None) + bool(self.files) + bool(self.build) != 1:
            raise ValueError("give either path (local), files (downloads) or build (a command that makes the files)")
        if self.build and not any("{output}" in word for word in self.build):
            raise ValueError("build: one word must hold {output}, the folder that the command is to fill")
        if up := [name for name in self.files or () if {".", ".."} & set(name.split("/"))]:
            raise ValueError(f"files: {up[0]} leads out of the folder")
        return self


class Assets(Strict):
    """What is copied to the bucket. `assets://NAME/FILE` in the config means the copy of an asset."""

    datasets: dict[Name, Asset]
    models: dict[Name, Asset] = Field(description="weights")
    tokenizers: dict[Name, Asset]
    fetch_on: Annotated[Literal["laptop", "pod"], VOLATILE] = Field(
        description="who downloads `files`: this machine before the TPU exists, or worker 0 of the pod"
    )

    def each(self) -> Iterator[tuple[Kind, str, Asset]]:
        """Every asset with its kind and name."""
        for name, asset in self.datasets.items():
            yield "dataset", name, asset
        for name, asset in self.models.items():
            yield "model", name, asset
        for name, asset in self.tokenizers.items():
            yield "tokenizer", name, asset
