"""The cure that the message of a finding names."""

import pytest

from controller.core.finding import Finding


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        (
            "off; run `gcloud services enable a b --project=p`, or set cloud=local",
            "gcloud services enable a b --project=p",
        ),
        ("`env.secrets` lacks it; see `hf auth login`", "hf auth login"),
        ("set tpu.external_ip=false, or ask (https://a.b/c)", "tpu.external_ip=false"),
        ("is empty; set it, e.g. 'program.command=[python, train.py]'", "'program.command=[python, train.py]'"),
        ("request more (https://a.b/quotas), or wait", "https://a.b/quotas"),
        ("choose another zone", ""),
    ],
)
def test_the_first_command_then_an_override_then_an_address(message: str, cure: str) -> None:
    assert Finding("x", "error", "k", message).cure == cure
