"""The compiler's text, recorded and by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from conf.schema.infra.topology import find_topology
from trainer.fit.schedule import calls, find_transfer, group_size, num_bytes, parse, trip_count
from trainer.fit.step_time import device_rates, step_time

RECORDED = Path(__file__).with_name("products_v5e.txt.gz")
"""libtpu 0.0.52, v5e:2x4: x + silu(x W1) W2 over 8 layers with remat, its gradient and an update. x is bfloat16
[8 x 4096, 1024], W1 and W2 float32 [1024, 4096] and [4096, 1024], all split over 8 devices. Without metadata and
backend_config."""

LOOP = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%n, %two)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %x)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %limit = s32[] constant(64)
  %m = s32[] get-tuple-element(%q), index=0
  ROOT %less = pred[] compare(%m, %limit), direction=LT
}

ENTRY %main (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  ROOT %loop = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body
}
"""


def test_a_recorded_program_takes_its_products_at_the_peak_rate():
    """Seven products per layer: two forward, one again, four backward, of 4096 x 1024 x 4096 on each device."""
    module = parse(gzip.decompress(RECORDED.read_bytes()).decode())
    found = step_time(module, device_rates(find_topology("v5litepod-8")))
    assert found.products == pytest.approx(7 * 8 * 2 * 4096 * 1024 * 4096 / 197e12, rel=1e-3)
    assert 0 < found.waiting < found.transfer  # weights arrive beside the products of a loop over devices
    assert found.kernels == 0


def test_an_unrolled_loop_runs_less_often_than_its_limit():
    module = parse(LOOP)
    assert module.entry == "main"
    loop = module.computations["main"]["loop"]
    assert list(calls(module, loop)) == [("body", 32.0)]
    assert trip_count(module, "condition") == 64.0
    assert trip_count(module, "nowhere") == 1.0


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", 4),
        ("replica_groups=[2,16]<=[32], dimensions={0}", 16),
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_1'}, dimensions={0}", 4),
        ("replica_groups=mesh['axis_0'=16,'axis_1'=4] {'axis_0','axis_1'}", 64),
        ("dimensions={0}", 1),
    ],
)
def test_groups_are_read_in_each_of_their_spellings(attributes, size):
    lines = ["ENTRY %main (a: f32[8]) -> f32[8] {", f"  %g = f32[8]{{0}} all-gather(%a), {attributes}", "}"]
    assert group_size(parse("\n".join(lines)).computations["main"]["g"]) == size


def test_parts_of_a_collective_are_told_apart():
    def fused(name: str, opcode: str, channel: int) -> str:
        line = f"%g = bf16[32]{{0}} {opcode}(%a), channel_id={channel}, replica_groups={{{{0,1,2,3}}}}"
        return f"%{name} (a: bf16[8]) -> bf16[32] {{\n  %a = bf16[8]{{0}} parameter(0)\n  {line}\n}}\n"

    gathers = [fused(name, "all-gather", 7) for name in ("start", "async_collective_fusion.1")]
    module = parse(
        "\n".join([*gathers, fused("all-reduce-scatter.2", "all-reduce", 8)])
        + """
ENTRY %main (x: bf16[8]) -> bf16[32] {
  %x = bf16[8]{0} parameter(0)
  %async-collective-start.1 = bf16[32]{0} fusion(%x), kind=kCustom, calls=%start
  %fusion.3 = bf16[32]{0} fusion(%x), kind=kCustom, calls=%async_collective_fusion.1
  %async-collective-done.1 = bf16[32]{0} fusion(%x), kind=kCustom, calls=%start
  %fusion.4 = bf16[8]{0} fusion(%fusion.3), kind=kCustom, calls=%all-reduce-scatter.2
  %permute = (bf16[8]{0}, bf16[8]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %arrived = bf16[8]{0} collective-permute-done(%permute)
}
"""
    )
    body = module.computations["main"]
    found = [t and (t.kind, t.part, t.key) for t in (find_transfer(module, i, body) for i in body.values())]
    assert found == [
        None,
        ("all-gather", "start", "7"),
        ("all-gather", "step", "7"),
        ("all-gather", "done", "7"),
        ("reduce-scatter", "all", "8"),
        ("collective-permute", "start", "permute"),
        ("collective-permute", "done", "permute"),
    ]


def test_bytes_of_a_tuple_and_of_what_is_in_hbm():
    shape = "(bf16[2,8]{1,0:T(8,128)(2,1)S(1)}, f32[4]{0}, pred[16]{0}, s32[])"
    assert num_bytes(shape) == 32 + 16 + 16 + 4
    assert num_bytes(shape, only_hbm=True) == 16 + 16 + 4
