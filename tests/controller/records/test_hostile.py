"""A record is read from a bucket that others can write to."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controller.core.errors import ConfigError
from controller.records import restore


def archived(name: str) -> Any:
    """A bucket that has one archive, whatever it is asked for."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    return SimpleNamespace(download=lambda *_: buffer.getvalue())


@pytest.mark.parametrize("sha256", ["../../planted", "a" * 63, "A" * 64, 1, "a" * 64 + "\n"])
def test_what_is_no_hash_names_no_file(tmp_path: Path, sha256: Any) -> None:
    google = archived("code.py")
    with pytest.raises(ConfigError, match="invalid SHA-256"):
        restore._restore_code(google, {"run": "r", "bucket": "b", "code_sha256": sha256}, tmp_path / "a/state")
    assert list(tmp_path.iterdir()) == []
    assets = [{"kind": "dataset", "name": "d", "identity": "i" * 12, "files": {"f": sha256}}]
    with pytest.raises(ConfigError, match="invalid SHA-256"):
        restore._recorded_inputs(google, {"run": "r", "bucket": "b", "run_yaml": "", "assets": assets}, "r", tmp_path)


@pytest.mark.parametrize("name", ["code.py", "../../planted"])
def test_code_that_is_not_what_the_record_says_is_not_kept(tmp_path: Path, name: str) -> None:
    google = archived(name)
    with pytest.raises(Exception, match=r"does not match the record|leads outside it"):
        restore._restore_code(google, {"run": "r", "bucket": "b", "code_sha256": "a" * 64}, tmp_path / "state")
    assert [path.name for path in (tmp_path / "state/code").iterdir()] == []
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
