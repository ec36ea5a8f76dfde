"""What is copied to the bucket before a TPU is billed."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from conf.strict import VOLATILE, Name, Strict


class RemoteFile(Strict):
    url: Annotated[str, StringConstraints(pattern=r"^https?://")]
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")] = Field(description="refused if it differs")


class Dataset(Strict):
    """Either a local path, or files to download. What counts for a run's identity is their content, not their place."""

    path: Annotated[str | None, VOLATILE] = Field(default=None, description="a local file or folder")
    files: Annotated[dict[str, RemoteFile] | None, VOLATILE] = Field(
        default=None, description="file name: where it is fetched"
    )

    @model_validator(mode="after")
    def one_source(self) -> Self:
        if (self.path is None) == (not self.files):
            raise ValueError("give either path (local) or files (downloads)")
        return self


class Assets(Strict):
    """What is copied to the bucket. `assets://NAME/FILE` in the config means the copy."""

    datasets: dict[Name, Dataset]
