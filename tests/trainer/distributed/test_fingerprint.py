"""Fingerprints of data: of what is in the files, not of when or where."""

import pytest

from trainer.distributed import fingerprint


def test_names_and_contents_count(tmp_path):
    for name, files in {"a": "x1 y2", "b": "x1 y2", "c": "x1 z2", "d": "x1 y3"}.items():
        (tmp_path / name / "data").mkdir(parents=True)
        for file, text in files.split():
            (tmp_path / name / "data" / file).write_text(text)

    def found(path: str) -> str:
        return fingerprint.file_fingerprint(str(tmp_path / path))

    whole = [found(f"{name}/data") for name in "abcd"]
    assert whole[0] == whole[1]
    assert len(set(whole)) == 3
    assert found("a/data/x") == found("b/data/x")
    assert found("a/data/?") == found("b/data/[x-z]")
    assert found("none") == "absent"


@pytest.mark.parametrize("at", [0, fingerprint.MAX_FULL_HASH_BYTES])
def test_of_a_large_file_the_ends_count(tmp_path, at):
    data = bytearray(fingerprint.MAX_FULL_HASH_BYTES + 1)
    file = tmp_path / "large"
    file.write_bytes(data)
    before = fingerprint.file_fingerprint(str(file))
    data[at] = 1
    file.write_bytes(data)
    assert fingerprint.file_fingerprint(str(file)) != before
