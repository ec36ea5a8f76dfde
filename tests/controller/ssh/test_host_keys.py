"""Which host keys a worker is known by, and for how long."""

from pathlib import Path

import pytest

from controller.ssh.host_keys import HostKeys

A, B = {"ssh-ed25519": "A"}, {"ssh-ed25519": "B"}


@pytest.mark.parametrize(
    ("published", "expected", "reads"),
    [
        ([["ssh-ed25519 A", "ssh-ed25519 B"]], [A, B, A], 1),
        ([[], ["ssh-ed25519 A", "ssh-ed25519 B"]], [{}, B, A], 2),
        ([["", "ssh-ed25519 B"], ["ssh-ed25519 A", "ssh-ed25519 B"]], [{}, B, A], 2),
    ],
    ids=["all there", "none at first", "one late"],
)
def test_they_are_read_until_they_are_there(published: list, expected: list[dict[str, str]], reads: int) -> None:
    left = list(published)
    keys = HostKeys(lambda: left.pop(0))
    assert [keys.keys_of(worker) for worker in (0, 1, 0)] == expected
    assert len(published) - len(left) == reads


def test_what_is_known_once_stays_and_further_kinds_are_added(tmp_path: Path) -> None:
    published = [["ssh-ed25519 A", ""], ["ssh-ed25519 C\nssh-rsa R", "ssh-ed25519 B"]]
    keys = HostKeys(lambda: published.pop(0), tmp_path / "kept", "one")
    assert (keys.keys_of(0), keys.keys_of(1)) == (A, B)
    assert keys.keys_of(0) == {"ssh-ed25519": "A", "ssh-rsa": "R"}


def test_they_outlive_the_process_but_not_the_pod(tmp_path: Path) -> None:
    file = tmp_path / "known_hosts" / "pod"
    assert HostKeys(lambda: ["ssh-ed25519 A"], file, "one").keys_of(0) == A
    assert HostKeys(lambda: pytest.fail("they are kept"), file, "one").keys_of(0) == A
    assert HostKeys(lambda: ["ssh-ed25519 B"], file, "two").keys_of(0) == B


def test_what_a_program_publishes_as_a_key_and_is_none_is_left_out(tmp_path: Path) -> None:
    hostile = "ssh-ed25519\nssh-ed25519 \nssh-ed25519\n../x y\n\nssh-ed25519 A\tB\nssh-rsa R\x1b[2J\n# incarnation one"
    assert HostKeys(lambda: [f"{hostile}\nssh-ed25519 A"], tmp_path / "kept", "one").keys_of(0) == A
    assert HostKeys(list, tmp_path / "kept", "one").cached(0) == A
    assert HostKeys(lambda: ["ssh-dss D\nssh-ed25519 A a comment"]).keys_of(0) == A, "kinds that cannot be checked"
