"""Operations and bytes of single instructions, counted by hand."""

from __future__ import annotations

import pytest

from trainer.fit import work
from trainer.fit.schedule import Instruction, Module, parse


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
    assert work.product_flops(module, product, body) == flops


def test_products_inside_a_fusion_count():
    fused = """%fused (p: bf16[64,32], q: bf16[32,16]) -> bf16[64,16] {
  %p = bf16[64,32]{1,0} parameter(0)
  %q = bf16[32,16]{1,0} parameter(1)
  %c = bf16[64,16]{1,0} convolution(%p, %q), dim_labels=bf_io->bf
  ROOT %d = bf16[64,16]{1,0} add(%c, %c)
}"""
    line = "%f = bf16[64,16]{1,0} fusion(%a, %b), kind=kOutput, calls=%fused"
    module, fusion, body = instruction("bf16[64,32]{1,0} bf16[32,16]{1,0:S(1)}", line, fused)
    assert work.product_flops(module, fusion, body) == 2 * 64 * 32 * 16
    assert work.hbm_bytes(module, fusion, body) == 2 * (64 * 32 + 64 * 16)  # b is in VMEM


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
    assert work.hbm_bytes(module, fusion, body) == 2 * 4 * 1024


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
    assert work.kernel_flops(kernel, body) == products * 2 * 3 * 32 * 8192 * 8192 * 128 * share


@pytest.mark.parametrize(
    ("kind", "sent"),
    [("all-gather", 3), ("reduce-scatter", 0.75), ("all-reduce", 1.5), ("all-to-all", 0.75), ("collective-permute", 1)],
)
def test_what_a_device_sends(kind, sent):
    """Of 4 devices, as a multiple of what it has."""
    _, found, body = instruction("f32[256]{0}", f"%c = f32[256]{{0}} {kind}(%a), replica_groups={{{{0,1,2,3}}}}")
    assert work.sent_bytes(kind, found, body) == sent * 1024
