"""conf/model/ against the published models: every switch, every size, the number of weights."""

import pytest
import yaml

from conf.schema.training.model import KEYS_FREE_OF_WEIGHTS, Model
from tests.groups import CONF, load_group
from tests.paths import ROOT
from trainer.models import weights
from trainer.pretrained import hf_families

PUBLISHED = yaml.safe_load((ROOT / "tests" / "trainer" / "fixtures" / "published.yaml").read_text())
PADDING = {"gemma2_2b": 128, "gemma2_9b": 128}
"""Rows that DeepMind's tables have more than Hugging Face's."""


def test_every_model_is_compared():
    ours = {file.stem for file in (CONF / "model").glob("*.yaml")}
    assert ours == PUBLISHED.keys() | {"nanochat_d16", "nash_mhc_3b", "tiny", "trm", "pretrained", "hf"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_the_published_one(name):
    """What is computed, and the number of weights; how it is computed, and first values, may differ."""
    ours, theirs = Model(**load_group(f"model/{name}")), hf_families.model_from_config(PUBLISHED[name]["config"])
    free = KEYS_FREE_OF_WEIGHTS - {"max_seq_len"}
    found, wanted = ours.model_dump(exclude=free), theirs.model_dump(exclude=free)
    wanted["vocab_size"] += PADDING.get(name, 0)
    assert found == wanted
    assert weights.num_params(ours) == PUBLISHED[name]["parameters"] + PADDING.get(name, 0) * ours.dim


def test_nanochat_d16_has_the_weights_of_the_original():
    """And two scalars for each layer."""
    assert weights.num_params(Model(**load_group("model/nanochat_d16"))) == 335_544_320 + 2 * 16
