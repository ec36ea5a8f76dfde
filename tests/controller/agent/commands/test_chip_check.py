"""The tests of a chip find what a broken chip would compute, store or send, and pass a good one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from controller.agent.commands import chip_check
from controller.agent.commands.chip_check import ON_CPU, ON_TPU, Sizes

SIDE, PRODUCTS, WORDS = 64, 4, 4096


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.local_devices()[:1]), ("chip",))


@pytest.fixture(scope="module")
def total() -> np.ndarray:
    a, b = (x.astype(jnp.bfloat16) for x in chip_check.factors(SIDE, PRODUCTS))
    return np.asarray(chip_check.sum_of_products(jnp.asarray(a), jnp.asarray(b), PRODUCTS))


@pytest.mark.parametrize("sizes", [ON_TPU, ON_CPU])
def test_sums_are_exact_in_float32(sizes: Sizes) -> None:
    assert sizes.side * sizes.products < 2**24
    assert sizes.block_words % chip_check.COLUMNS == 0


def test_a_right_product_passes(total: np.ndarray) -> None:
    a, b = chip_check.factors(SIDE, PRODUCTS)
    assert (total == sum(a[k : k + SIDE].astype(int) @ b.astype(int) for k in range(PRODUCTS))).all()
    assert chip_check.wrong_rows(a, b, total, PRODUCTS) == 0


@pytest.mark.parametrize("wrong", ["one bit", "one element", "a row of zeros", "a missing product", "not a number"])
def test_a_wrong_product_is_found(total: np.ndarray, wrong: str) -> None:
    a, b = chip_check.factors(SIDE, PRODUCTS)
    broken = total.copy()
    if wrong == "one bit":
        broken.view(np.uint32)[3, 5] ^= 1 << 20
    elif wrong == "one element":
        broken[3, 5] += 1
    elif wrong == "a row of zeros":
        broken[3] = 0
    elif wrong == "not a number":
        broken[3, 5] = np.nan
    else:
        broken -= a[:SIDE].astype(np.float32) @ b.astype(np.float32)
    assert chip_check.wrong_rows(a, b, broken, PRODUCTS) == (SIDE if wrong == "a missing product" else 1)


@pytest.mark.parametrize("changes", [(), ((0, 0, 0),), ((0, 3, 1023), (0, 2, 7))])
def test_words_that_changed_in_memory_are_counted(mesh: Mesh, changes: tuple[tuple[int, ...], ...]) -> None:
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    block = chip_check.pattern(jnp.uint32(7), WORDS, rows)
    for place in changes:
        block = block.at[place].set(block[place] ^ 1)
    assert np.asarray(chip_check.wrong_words(block, jnp.uint32(7), rows)).tolist() == [len(changes)]


def test_a_block_that_holds_another_pattern_is_wrong_throughout(mesh: Mesh) -> None:
    """As when two addresses lead to the same place."""
    rows = NamedSharding(mesh, PartitionSpec("chip"))
    block = chip_check.pattern(jnp.uint32(7), WORDS, rows)
    assert np.asarray(chip_check.wrong_words(block, jnp.uint32(8), rows)).tolist() == [WORDS]


def test_every_chip_must_take_part_in_the_all_reduce() -> None:
    right = chip_check.expected_rows(4, 8)
    assert chip_check.all_reduce_faults({0: right, 1: right.copy()}, 4, 8) == []
    absent = right.copy()
    absent[2] = 0
    adds = "what it adds to the all-reduce is missing or wrong"
    assert chip_check.all_reduce_faults({0: absent, 1: absent.copy()}, 4, 8) == [(2, adds)], "told once"
    twice = right.copy()
    twice[1] *= 2
    assert chip_check.all_reduce_faults({3: twice}, 4, 8) == [(1, adds)]
    deaf = {0: right, 3: np.zeros_like(right)}
    assert chip_check.all_reduce_faults(deaf, 4, 8) == [(3, "its result of the all-reduce is wrong")]


def test_good_devices_pass(mesh: Mesh) -> None:
    small = Sizes(SIDE, PRODUCTS, WORDS, 8)
    faults, rate = chip_check.check_products(mesh, small)
    assert (faults, rate > 0) == ([], True)
    assert chip_check.check_memory(mesh, small) == ([], pytest.approx(2 * 4e-9 * WORDS))
    assert chip_check.check_all_reduce(mesh, small) == []
