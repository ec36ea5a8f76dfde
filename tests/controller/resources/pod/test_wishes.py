"""A wish that Google refuses with words about it is dropped, once, and the request is made again without it."""

from typing import Any

import pytest

from controller.context import Context
from controller.gcp.google_errors import GoogleError
from controller.resources.pod.provisioner import Place, SliceSpec
from controller.resources.pod.refusals import PlaneAdvice
from tests.controller.resources.pod.test_slice_requests import ALONE, Market, Scripted, market

__all__ = ["market"]


@pytest.mark.parametrize(
    ("refusals", "asked_without"),
    [
        (
            ["Invalid value for field 'resource.scheduling.preemptionNoticeDuration': ''. Not supported."],
            ["", "notice"],
        ),
        (
            ["preemption_notice_duration cannot be used with machine type tpu7x-standard-4t in zone a-b-c"],
            ["", "notice"],
        ),
        (["Preemption notice duration is not allowed."] * 2, ["", "notice"]),
        (["Invalid value for field 'notice': bad", "soft: not here"], [""]),
        (["Preemption notice is not allowed", "no such colour: reddish"], ["", "notice", "colour notice"]),
    ],
    ids=["the field", "another spelling, beside a type", "twice", "no wish", "one after the other"],
)
def test_a_wish_that_google_refuses_is_dropped_once_with_a_note(
    market: Market, monkeypatch: pytest.MonkeyPatch, refusals: list[str], asked_without: list[str]
) -> None:
    wishes = {"notice": ("spot", "preemption.?notice"), "colour": ("spot", "colour"), "soft": ("flex_start", "soft")}
    advice, left, sent = PlaneAdvice("r", "t", "i", wishes=wishes), list(refusals), list[str]()
    monkeypatch.setattr(Scripted, "advice", advice)
    create = market.other.create

    def refuse(context: Context, name: str, spec: SliceSpec, place: Place) -> Any:
        sent.append(" ".join(sorted(spec.without)))
        if left:
            raise GoogleError("insert", 400, "invalid", left.pop(0))
        return create(context, name, spec, place)

    monkeypatch.setattr(market.other, "create", refuse)
    monkeypatch.setattr(market.queue, "waits", ALONE + 100)
    market.search().run()
    assert sent == asked_without
    granted = len(asked_without) > len(refusals)
    assert [entry[1] for entry in market.entries if entry[0] == "other"] == (
        ["granted"] if granted else ["bad_request"]
    )
    notes = [note for note in market.notes if "asking again without" in note]
    assert [note.partition("without ")[2].partition(",")[0] for note in notes] == ["notice", "colour"][: len(sent) - 1]
