"""What overlaps, and what a chip does per second."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from conf.schema.infra.topology import find_topology
from trainer.fit.schedule import parse
from trainer.fit.step_time import Rates, StepTime, device_rates, step_time

RATES = Rates(flops=1e6, hbm_bytes=1e6, link_bytes=1e3, axis_links=(2,), num_devices=4)
"""A product below takes 0.5 s, an all-gather of 4 KB 1.5 s."""
HEAD = """ENTRY %main (x: f32[256], a: bf16[50,50], b: bf16[50,100]) -> f32[1024] {
  %x = f32[256]{0} parameter(0)
  %a = bf16[50,50]{1,0:S(1)} parameter(1)
  %b = bf16[50,100]{1,0:S(1)} parameter(2)
"""
PRODUCT = "  %p = bf16[50,100]{1,0:S(1)} convolution(%a, %b), dim_labels=bf_io->bf\n"
GROUPS = "replica_groups={{0,1,2,3}}"


def test_a_transfer_beside_a_product_is_waited_for_only_afterwards():
    start = f"  %s = (f32[256]{{0}}, f32[1024]{{0}}) all-gather-start(%x), {GROUPS}\n"
    done = "  %d = f32[1024]{0} all-gather-done(%s)\n"
    overlapped = step_time(parse(HEAD + start + PRODUCT + done + "}"), RATES)
    assert asdict(overlapped) == pytest.approx(asdict(StepTime(products=0.5, waiting=1.036, transfer=1.536)))
    before = step_time(parse(HEAD + start + done + PRODUCT + "}"), RATES)
    assert before.waiting == before.transfer == pytest.approx(1.536)


def test_a_transfer_in_one_instruction_is_waited_for():
    found = step_time(parse(HEAD + PRODUCT + f"  %g = f32[1024]{{0}} all-gather(%x), {GROUPS}\n" + "}"), RATES)
    assert found.waiting == found.transfer == pytest.approx(1.536)
    assert found.total == pytest.approx(0.5 + 1.536)


def test_an_instruction_takes_its_operations_or_its_bytes():
    slow = HEAD.replace("S(1)", "") + PRODUCT.replace(":S(1)", "") + "}"
    assert step_time(parse(slow), Rates(1e9, 1e3, 1.0, (1,), 1)).products == pytest.approx(2 * (2500 + 2 * 5000) / 1e3)


def test_rates_are_those_of_a_device_and_its_slice():
    v5e, seven = device_rates(find_topology("v5litepod-8")), device_rates(find_topology("tpu7x-128"))
    assert (v5e.flops, v5e.hbm_bytes, v5e.link_bytes) == (197e12, 8.2e11, 5e10)
    assert (seven.flops, seven.link_bytes) == (1155e12, pytest.approx(1e11))  # two devices per chip
    links = {"v5litepod-8": (1, 1), "v5litepod-256": (2, 2), "v5litepod-1": (1,), "v5p-128": (2, 2, 2)}  # 2x4: no torus
    assert {name: device_rates(find_topology(name)).axis_links for name in links} == links
