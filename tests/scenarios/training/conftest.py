"""Fixtures of the trainer's tests, eight virtual devices included, that scenarios use as well."""

from tests.trainer.conftest import adamw as adamw
from tests.trainer.conftest import compile_cache as compile_cache
from tests.trainer.conftest import grpo_run as grpo_run
from tests.trainer.conftest import lm_run as lm_run
from tests.trainer.conftest import puzzle_run as puzzle_run
from tests.trainer.conftest import pytest_configure as pytest_configure
from tests.trainer.conftest import tiny as tiny
