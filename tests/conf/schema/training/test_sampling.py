"""Where rollouts are sampled."""

from conf.schema.training.sampling import Sampling
from tests.groups import load_group


def sampling(**changes: int) -> Sampling:
    return Sampling.model_validate(load_group("loop/grpo")["sampler"] | changes)


def test_samplers_are_remote_on_workers_of_the_pod_or_on_further_pods() -> None:
    assert not sampling().is_remote
    assert sampling(workers=1).is_remote
    assert sampling(pods=1).is_remote
