"""What is said of flags that jaxlib does not accept, from what it logs before it ends the process."""

import pytest

from conf import xla_flags

LOG = """WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
{}
    @     0x7fac78640634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
"""
UNKNOWN = "F1129 02:27:41.889600   28707 parse_flags_from_env.cc:234] Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b"
ILLEGAL = "E1129 02:28:37.169004   30074 command_line_flags.cc:63] Couldn't interpret value x for flag xla_a."
OF_TPU = "F1129 02:27:41.889600   28707 parse_flags_from_env.cc:234] Unknown flag in XLA_FLAGS: --xla_tpu_a=1"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (UNKNOWN, "Unknown flags in XLA_FLAGS: --xla_a=1 --xla_b"),
        (f"{ILLEGAL}\n{UNKNOWN}", "Couldn't interpret value x for flag xla_a."),
        (OF_TPU, "Unknown flag in XLA_FLAGS: --xla_tpu_a=1; libtpu knows those of the TPU compiler: move them to "
                 "LIBTPU_INIT_ARGS"),
    ],
)  # fmt: skip
def test_the_flag_is_named(log: str, said: str) -> None:
    assert xla_flags.complaint(LOG.format(log), "0.12") == f"jaxlib 0.12 does not accept XLA_FLAGS: {said}"


def test_words_that_are_no_flags_are_named_unless_they_name_a_file() -> None:
    assert xla_flags.ignored_words("--xla_a=1 xla_b=2 -O1 '--xla_c=d e'") == ["xla_b=2", "-O1"]
    assert xla_flags.ignored_words("/etc/flags") == []
    assert xla_flags.ignored_words("") == []
    with pytest.raises(ValueError, match="No closing quotation"):
        xla_flags.ignored_words("--xla_a='b")
