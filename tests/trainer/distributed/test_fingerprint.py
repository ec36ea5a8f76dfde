"""Fingerprints of data: of what is in the files, not of when or where."""

import pytest

from trainer.distributed import fingerprint


def test_names_and_contents_count(tmp_path):
    for name, files in {
        "a": {"x": "1", "y": "2"},
        "b": {"x": "1", "y": "2"},
        "c": {"x": "1", "z": "2"},
        "d": {"x": "1", "y": "3"},
    }.items():
        (tmp_path / name / "data").mkdir(parents=True)
        for file, text in files.items():
            (tmp_path / name / "data" / file).write_text(text)
    found = [fingerprint.file_fingerprint(str(tmp_path / name / "data")) for name in "abcd"]
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert fingerprint.file_fingerprint(str(tmp_path / "a/data/x")) == fingerprint.file_fingerprint(
        str(tmp_path / "b/data/x")
    )
    assert fingerprint.file_fingerprint(str(tmp_path / "a/data/?")) == fingerprint.file_fingerprint(
        str(tmp_path / "b/data/[x-z]")
    )


@pytest.mark.parametrize("at", [0, fingerprint.MAX_FULL_HASH_BYTES])
def test_of_a_large_file_the_ends_count(tmp_path, at):
    data = bytearray(fingerprint.MAX_FULL_HASH_BYTES + 1)
    file = tmp_path / "large"
    file.write_bytes(data)
    before = fingerprint.file_fingerprint(str(file))
    data[at] = 1
    file.write_bytes(data)
    assert fingerprint.file_fingerprint(str(file)) != before


def test_nothing_is_absent(tmp_path):
    assert fingerprint.file_fingerprint(str(tmp_path / "none")) == "absent"
