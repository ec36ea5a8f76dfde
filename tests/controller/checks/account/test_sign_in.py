"""Whether Google knows the caller and the project, by hand-made answers; and the clock and the key of this machine."""

from pathlib import Path
from typing import Any

import pytest

from controller.checks.preflight import Answer, examine_cloud, probe_cloud
from controller.gcp.google_errors import ForbiddenError, GoogleError, NoCredentialsError, NotFoundError
from controller.ssh.login import public_key_line
from tests.composed import config_of
from tests.fakes.context import make_context
from tests.fakes.google import Answers

REFUSED = ForbiddenError("x", 403, "PERMISSION_DENIED", "no permission")
ASK = "projects.testIamPermissions"


class Fast(Answers):
    """Google, seen from a machine whose clock is a number of seconds fast."""

    seconds = 0.0

    def seconds_ahead(self, project: str) -> float:
        return self.seconds


def examined(google: Answers, folder: Path | None = None, project: str = "acme") -> dict[str, Answer]:
    config = config_of("program=command", "program.command=[a]", "cloud.project=acme")
    answers = examine_cloud(config, make_context(google, folder, project=project))
    return {answer.rule.id: answer for answer in answers}


@pytest.mark.parametrize(
    ("answers", "check", "said"),
    [
        ({ASK: NoCredentialsError("rejected; run `gcloud auth login`")}, "credentials", "rejected; run `gcloud"),
        ({"projects.get": NotFoundError("x", 404, "NOT_FOUND", "no")}, "project", "acme does not exist"),
        ({"projects.get": REFUSED, ASK: REFUSED}, "project", "acme does not exist, or you have no access to it"),
        ({"projects.get": {"lifecycleState": "DELETE_REQUESTED"}}, "project", "acme is being deleted"),
    ],
)
def test_where_no_answer_means_anything_the_rest_is_unknown(answers: dict[str, Any], check: str, said: str) -> None:
    found = examined(Answers(answers))
    [finding] = found[check].findings
    assert finding.message.startswith(said)
    assert finding.cure.startswith("gcloud ")
    asking = ("quota", "billing", "permissions", "bucket_taken", "organization", "clock", "tpu_permission", "apis")
    assert {found[name].outcome for name in asking} == {"unknown"}
    assert found["ssh_key"].outcome == "ok", "this machine is looked at all the same"
    assert found["quota"].unknown == f"not asked: see {check}"
    config = config_of("program=command", "program.command=[a]", "cloud.project=acme")
    assert probe_cloud(config, make_context(Answers(answers), project="acme")) == [finding]


def test_who_may_not_see_the_project_but_use_it_is_let_in() -> None:
    found = examined(Answers({"projects.get": REFUSED, ASK: {"permissions": ["serviceusage.services.use"]}}))
    assert found["project"].outcome == "ok"


def test_a_service_that_does_not_answer_leaves_the_rest_asked() -> None:
    found = examined(Answers({"projects.get": GoogleError("x", 503, "UNAVAILABLE", "later")}))
    assert (found["project"].outcome, found["quota"].outcome) == ("unknown", "ok")


def test_no_project_is_named() -> None:
    [finding] = examined(Answers(), project="your-project")["project"].findings
    assert finding.cure == "gcloud config set project ID"


@pytest.mark.parametrize(("seconds", "said"), [(61.0, "1:01 fast"), (-7300.0, "2:01:40 slow")])
def test_a_wrong_clock(seconds: float, said: str) -> None:
    google = Fast()
    google.seconds = seconds
    [finding] = examined(google)["clock"].findings
    assert (finding.severity, said in finding.message) == ("warning", True)
    google.seconds = 59.0
    assert examined(google)["clock"].outcome == "ok"


def test_a_key_that_others_may_use(tmp_path: Path) -> None:
    assert examined(Answers(), tmp_path)["ssh_key"].outcome == "ok", "it is made on first use"
    folder = tmp_path / "keys" / "acme"
    public_key_line(folder, "me")
    assert examined(Answers(), tmp_path)["ssh_key"].outcome == "ok"
    (folder / "id_ed25519").chmod(0o640)
    [finding] = examined(Answers(), tmp_path)["ssh_key"].findings
    assert finding.cure == f"chmod 600 {folder / 'id_ed25519'}"


def test_billing_that_few_may_see_is_unknown_and_no_finding() -> None:
    found = examined(Answers({"projects.getBillingInfo": REFUSED}))["billing"]
    assert (found.outcome, found.findings) == ("unknown", ())
    assert examined(Answers({"projects.getBillingInfo": GoogleError("x", 500, "INTERNAL", "no")}))["billing"].findings
