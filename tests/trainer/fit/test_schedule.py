"""The compiler's text, recorded and by hand."""

import gzip
from dataclasses import asdict
from pathlib import Path

import pytest

from conf.schema.topology import find_topology, tpu_type_table
from trainer.fit.schedule import Instruction, Module, calls, find_transfer, group_size, num_bytes, parse, trip_count
from trainer.fit.step_time import (
    Rates,
    StepTime,
    device_rates,
    has_rates,
    hbm_bytes,
    kernel_flops,
    product_flops,
    sent_bytes,
    step_time,
)

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


def instruction(operands: str, line: str, *others: str) -> tuple[Module, Instruction, dict[str, Instruction]]:
    """Return the instruction of `line`, of operands %a, %b and so on of these shapes, after other computations."""
    given = [f"  %{'abc'[i]} = {shape} parameter({i})" for i, shape in enumerate(operands.split())]
    module = parse("\n".join([*others, "ENTRY %main () -> f32[] {", *given, f"  {line}", "}"]))
    entry = module.computations["main"]
    return module, next(reversed(entry.values())), entry


@pytest.mark.parametrize(
    ("operands", "line", "flops"),
    [
        (  # heads as positions: of 8 by 8, each output reads the one input with its own weights
            "bf16[4,1,32]{0} bf16[32,8,16]{0}",
            "bf16[4,8,16] convolution(%a, %b), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_i0o->b0f",
            2 * 4 * 32 * 16 * 8,
        ),
        (  # a batch of products: one kernel element per output
            "bf16[4,8,32]{0} bf16[4,32,16]{0}",
            "bf16[4,8,16] convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
            2 * 4 * 8 * 32 * 16,
        ),
        (
            "f32[64,32]{0} f32[32,16]{0}",
            "f32[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 64 * 32 * 16,
        ),
    ],
)
def test_operations_of_products(operands, line, flops):
    module, product, body = instruction(operands, f"%c = {line}")
    assert product_flops(module, product, body) == flops


def test_products_inside_a_fusion_count():
    fused = """%fused (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[32,16]{1,0} parameter(1)
  %c = bf16[64,16]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
  ROOT %d = bf16[64,16]{1,0} add(%c, %c)
}"""
    line = "%f = bf16[64,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused"
    module, fusion, body = instruction("bf16[64,32]{1,0} bf16[32,16]{1,0:S(1)}", line, fused)
    assert product_flops(module, fusion, body) == 2 * 64 * 32 * 16
    assert hbm_bytes(module, fusion, body) == 2 * (64 * 32 + 64 * 16)  # b is in VMEM


def test_a_loop_reads_and_writes_one_layer_of_the_stack():
    fused = """%fused (p: f32[80,1024], q: s32[], r: f32[80,1024]) -> f32[80,1024] {
  %p = f32[80,1024]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %r = f32[80,1024]{1,0} parameter(2)
  %one = f32[1,1024]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={1,1024}
  ROOT %all = f32[80,1024]{1,0} dynamic-update-slice(%r, %one, %q, %q)
}"""
    line = "%f = f32[80,1024]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused"
    module, fusion, body = instruction("f32[80,1024]{1,0} s32[]{:S(6)} f32[80,1024]{1,0}", line, fused)
    assert hbm_bytes(module, fusion, body) == 2 * 4 * 1024


KEYS = "bf16[3,8,8192,128]{3,2,1,0}"
QUERIES = "bf16[3,32,8192,128]{3,2,1,0}"


@pytest.mark.parametrize(
    ("name", "blocks", "written", "products", "share"),
    [
        ("splash_mha_fwd_residuals.1", "s8[1,16,16]", QUERIES, 2, 0.5),
        ("splash_mha_dq_no_residuals.1", "s8[1,16,16]", QUERIES, 3, 0.5),
        ("splash_mha_dkv_no_residuals.1", "s8[1,16,16]", QUERIES, 4, 0.5),
        ("splash_mha_fwd_residuals.2", "s8[1,16,4]", QUERIES, 2, 0.25),
        # computes all gradients; writes that of the queries once per block of keys, and its blocks are not square
        ("splash_mha_dkv.1", "s8[1,16,4]", f"(bf16[3,4,32,8192,128]{{4,3,2,1,0}}, {KEYS})", 5, 0.5),
        ("another_kernel", "s8[1,16,16]", QUERIES, 0, 0.0),
    ],
)
def test_operations_of_attention_follow_its_mask(name, blocks, written, products, share):
    line = f'%{name} = {written} custom-call(%a, %b, %c), custom_call_target="tpu_custom_call"'
    _, kernel, body = instruction(f"{blocks}{{2,1,0}} {QUERIES} {KEYS}", line)
    assert kernel_flops(kernel, body) == products * 2 * 3 * 32 * 8192 * 8192 * 128 * share


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 3), ("reduce-scatter", 0.75), ("all-reduce", 1.5), ("all-to-all", 0.75), ("collective-permute", 1)],
)
def test_what_a_device_sends(kind, sent):
    """Of 4 devices, as a multiple of what it has."""
    _, found, body = instruction("f32[256]{0}", f"%c = f32[256]{{0}} {kind}(%a), replica_groups={{{{0,1,2,3}}}}")
    assert sent_bytes(kind, found, body) == sent * 1024


def test_how_fast_a_chip_is_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tpu_type_table()["generations"]["v6e"], "hbm_bytes_per_second", None)
    assert [has_rates(find_topology(name)) for name in ("v6e-8", "v5p-8")] == [False, True]
