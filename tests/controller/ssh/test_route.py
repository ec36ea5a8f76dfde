"""Which way to the workers `ssh.method=auto` takes, given the firewall rules and who we are on the internet."""

import io
from collections.abc import Callable
from email.message import Message
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import HTTPError

import pytest

from conf.schema.infra.cloud import IAP_RANGE
from controller.resources.pod.tpu_api.plane import NodeVms
from controller.ssh.fleet import SshTarget
from controller.ssh.route import PodConnector, admits_ssh, choose_route, find_public_ip

HERE = "8.8.4.4"


def rule(*sources: str, deny: bool = False, **other: Any) -> dict[str, Any]:
    speaks = [{"IPProtocol": "tcp", "ports": ["22"]}]
    return {"sourceRanges": list(sources), "denied" if deny else "allowed": speaks, **other}


def nobody_asks() -> str:
    raise AssertionError("our address does not matter here")


@pytest.mark.parametrize(
    ("rules", "external", "laptop", "way"),
    [
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], True, lambda: HERE, "external"),
        ([rule(IAP_RANGE), rule("0.0.0.0/0")], True, lambda: HERE, "external"),
        ([rule(IAP_RANGE), rule("9.9.9.0/24")], True, lambda: HERE, "iap"),
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], True, lambda: None, "iap"),
        ([rule(IAP_RANGE), rule(f"{HERE}/32")], False, nobody_asks, "iap"),
        ([rule(IAP_RANGE), rule("10.0.0.0/8")], True, nobody_asks, "iap"),
        ([rule(IAP_RANGE)], True, nobody_asks, "iap"),
        ([rule(f"{HERE}/32")], False, nobody_asks, "internal"),
        ([rule("10.0.0.0/8")], True, nobody_asks, "internal"),
        ([], True, nobody_asks, "internal"),
    ],
)
def test_the_way(rules: list[dict[str, Any]], external: bool, laptop: Callable[[], str | None], way: str) -> None:
    assert choose_route(rules, external=external, laptop=laptop) == way


@pytest.mark.parametrize(
    ("rules", "open_"),
    [
        ([rule(f"{HERE}/32")], True),
        ([rule(f"{HERE}/32", targetTags=["slipway"])], True),
        ([rule(f"{HERE}/32", targetTags=["other"])], False),
        ([rule(f"{HERE}/32", disabled=True)], False),
        ([rule(f"{HERE}/32"), rule("0.0.0.0/0", deny=True)], False),
        ([rule(f"{HERE}/32", priority=900), rule("0.0.0.0/0", deny=True)], True),
        ([rule(f"{HERE}/32"), rule("0.0.0.0/0", deny=True, priority=1001)], True),
        ([rule(f"{HERE}/32"), rule("9.9.9.0/24", deny=True, priority=1)], True),
    ],
)
def test_all_rules_decide_together(rules: list[dict[str, Any]], open_: bool) -> None:
    assert admits_ssh(rules, f"{HERE}/32", ("slipway",)) is open_


@pytest.mark.parametrize(("tags", "way"), [(("slipway",), "external"), (("theirs",), "iap"), ((), "iap")])
def test_the_tags_of_the_pod_itself_decide(tags: tuple[str, ...], way: str) -> None:
    """An adopted pod need not bear the tag that Slipway's own rules aim at."""
    google = SimpleNamespace(list_all=lambda *_, **__: [
        {**rule(f"{HERE}/32", targetTags=["slipway"]), "network": "n"}, {**rule(IAP_RANGE), "network": "n"}
    ])  # fmt: skip
    config = SimpleNamespace(ssh=SimpleNamespace(method="auto"))
    connector = PodConnector(
        cast(Any, config), cast(Any, google), cast(Any, None), cast(Any, SimpleNamespace(project="p")), lambda: HERE
    )
    pod = SshTarget(
        "pod", NodeVms("projects/p/locations/z/nodes/pod"), "one", "z", "n", tags, (("10.0.0.2", "34.0.0.2"),)
    )
    assert connector.route_to(pod) == way


@pytest.mark.parametrize(
    ("asked", "found"),
    [("good", "8.8.4.4"), ("down good", "8.8.4.4"), ("html six good", "8.8.4.4"), ("html down", None)],
)
def test_the_first_service_that_knows_our_address_is_believed(
    monkeypatch: pytest.MonkeyPatch, asked: str, found: str | None
) -> None:
    answers = {"good": b"8.8.4.4\n", "html": b"<html>", "six": b"2001:db8::1\n"}

    def answer(service: str, timeout: float) -> io.BytesIO:
        if service not in answers:
            raise HTTPError(service, 500, "", Message(), None)
        return io.BytesIO(answers[service])

    monkeypatch.setattr("urllib.request.urlopen", answer)
    assert find_public_ip(tuple(asked.split())) == found
