"""Test every chip of a slice: matrix products, memory, and an all-reduce over all of them.

`check_health` runs this file on every worker with the Python of the run's venv, which has JAX; the agent never imports
it. It works with any JAX that has `NamedSharding`. The answer is the last line of stdout; the file that the second
argument names holds the current stage. Every expected value is an integer that float32 holds exactly, so any difference
is a fault of the hardware.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = Any
Fault = tuple[int, str]
"""Index of a device among those that were tested, and what is wrong with it."""
HBM_SHARE = 0.8
"""Share of the free memory that is tested; the rest is left for XLA's buffers and fragmentation."""
COLUMNS = 1024
"""Words per row of a block; a TPU pads rows that are not multiples of its tiles."""


class Sizes(NamedTuple):
    side: int
    """Rows and columns of a matrix; side * products < 2**24, so that sums stay exact in float32."""
    products: int
    block_words: int
    """Words of 4 bytes per block of memory."""
    row_words: int
    """Words that each device adds to the all-reduce."""


ON_TPU, ON_CPU = Sizes(4096, 256, 1 << 27, 1024), Sizes(128, 4, 1 << 16, 64)


def factors(side: int, products: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the factors, with entries -1, 0 and 1: product k multiplies rows k to k + side of the first one."""
    draw = np.random.default_rng(0)
    return draw.integers(-1, 2, (side + products, side), np.int8), draw.integers(-1, 2, (side, side), np.int8)


@partial(jax.jit, static_argnums=2)
def sum_of_products(a: Array, b: Array, products: int) -> Array:
    """Return the float32 sum of all products of bfloat16 factors."""

    def add(k: Array, total: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(a, k, b.shape[0])
        return total + jnp.dot(rows, b, preferred_element_type=jnp.float32)

    return jax.lax.fori_loop(0, products, add, jnp.zeros(b.shape, jnp.float32))


def wrong_rows(a: np.ndarray, b: np.ndarray, total: np.ndarray, products: int) -> int:
    """Return how many rows of `sum_of_products` are wrong, by multiplying both sides with a vector (Freivalds).

    One wrong element always shows; several in a row cancel out with a probability below one in a thousand.
    """
    vector = np.random.default_rng(1).integers(1, 1000, b.shape[1]).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(a.astype(np.float64) @ (b.astype(np.float64) @ vector))])
    expected = sums[products : products + b.shape[0]] - sums[: b.shape[0]]
    return int(np.count_nonzero(total.astype(np.float64) @ vector != expected))


def check_products(local: Mesh, sizes: Sizes) -> tuple[list[Fault], float]:
    """Multiply on all local devices at once; return the faults and the TFLOP/s of each device at least."""
    a, b = factors(sizes.side, sizes.products)
    everywhere = NamedSharding(local, PartitionSpec())
    on_device = [jax.device_put(x.astype(jnp.bfloat16), everywhere) for x in (a, b)]
    sum_of_products(*on_device, sizes.products).block_until_ready()  # compiles
    began = time.perf_counter()
    total = sum_of_products(*on_device, sizes.products).block_until_ready()
    rate = 2.0 * sizes.side**3 * sizes.products / (time.perf_counter() - began) / 1e12
    faults = []
    for index, part in enumerate(per_device(total, local)):
        if wrong := wrong_rows(a, b, part, sizes.products):
            faults.append((index, f"{wrong} of {sizes.side} rows of a matrix product are wrong"))
    return faults, rate


@partial(jax.jit, static_argnums=(1, 2))
def pattern(seed: Array, words: int, sharding: NamedSharding) -> Array:
    """Return words that depend on position, device and seed: [devices, rows, COLUMNS], split by device."""
    shape = (sharding.mesh.size, words // COLUMNS, COLUMNS)
    device, row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(3))
    position = (row * jnp.uint32(COLUMNS) + column) * jnp.uint32(2654435761)
    return jax.lax.with_sharding_constraint(position ^ (device * jnp.uint32(40503)) ^ seed, sharding)


@partial(jax.jit, static_argnums=2)
def wrong_words(block: Array, seed: Array, sharding: NamedSharding) -> Array:
    """Return how many words of a block on each device are not those that `pattern` wrote."""
    different = block != pattern(seed, block.shape[1] * COLUMNS, sharding)
    return jnp.sum(different.astype(jnp.int32), axis=(1, 2))


def check_memory(local: Mesh, sizes: Sizes) -> tuple[list[Fault], float]:
    """Fill most of the free memory of all local devices, read it back, and do so again with every bit inverted.

    Returns:
        The faults, and how many GB of each device were tested.
    """
    rows = NamedSharding(local, PartitionSpec("chip"))
    wrong = np.zeros(local.size, np.int64)
    tested = 0
    for inverted in (0, 0xFFFFFFFF):
        seeds = [jnp.uint32((number * 0x9E3779B9 & 0xFFFFFFFF) ^ inverted) for number in range(_blocks(local, sizes))]
        blocks: list[Array] = []
        for seed in seeds:
            try:
                blocks.append(pattern(seed, sizes.block_words, rows).block_until_ready())
            except RuntimeError as error:  # less is free than it says
                if "RESOURCE_EXHAUSTED" not in str(error) or not blocks:
                    raise
                break
        tested = len(blocks)
        for seed in seeds[:tested]:
            wrong += np.asarray(wrong_words(blocks.pop(0), seed, rows))
    text = f"words of {tested} blocks of {4 * sizes.block_words / 1e6:.0f} MB do not read back as written"
    return [(i, f"HBM: {count} {text}") for i, count in enumerate(wrong) if count], 4e-9 * sizes.block_words * tested


def _blocks(local: Mesh, sizes: Sizes) -> int:
    statistics = [device.memory_stats() for device in local.devices.flat]
    if not all(statistics):
        return 2  # the CPU backend
    free = min(each["bytes_limit"] - each["bytes_in_use"] for each in statistics)
    return max(1, int(HBM_SHARE * free) // (4 * sizes.block_words))


def expected_rows(devices: int, words: int) -> np.ndarray:
    """Return the all-reduce's right result: row i is what device i adds, int32 of [devices, words]."""
    rows, columns = np.indices((devices, words))
    return ((rows + 1) * 65_537 + columns).astype(np.int32)


def all_reduce_faults(received: dict[int, np.ndarray], devices: int, words: int) -> list[Fault]:
    """Return the faults that the results on some devices show.

    Row i comes from device i alone. If every row of a result is wrong, its receiver is at fault, otherwise the senders.
    """
    expected = expected_rows(devices, words)
    faults: dict[Fault, None] = {}
    for receiver, result in received.items():
        wrong = np.flatnonzero((result != expected).any(axis=1))
        if len(wrong) == devices:
            faults[(receiver, "its result of the all-reduce is wrong")] = None
            continue
        for sender in wrong:
            faults[(int(sender), "what it adds to the all-reduce is missing or wrong")] = None
    return list(faults)


def check_all_reduce(everyone: Mesh, sizes: Sizes) -> list[Fault]:
    """Add a row from each device of the slice, and check the sum on each local device."""
    count, words = everyone.size, sizes.row_words
    split, whole = NamedSharding(everyone, PartitionSpec("chip")), NamedSharding(everyone, PartitionSpec())

    @partial(jax.jit, out_shardings=split)
    def parts() -> Array:
        shape = (count, count, words)
        device, row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
        return jnp.where(device == row, (row + 1) * 65_537 + column, 0)

    total = jax.jit(lambda x: x.sum(axis=0), out_shardings=whole)(parts())
    order = {device: index for index, device in enumerate(everyone.devices.flat)}
    received = {order[shard.device]: np.asarray(shard.data) for shard in total.addressable_shards}
    return all_reduce_faults(received, count, words)


def per_device(x: Array, mesh: Mesh) -> list[np.ndarray]:
    """Return the copy of a replicated array that each device holds, in the order of the mesh."""
    copies = {shard.device: shard.data for shard in x.addressable_shards}
    return [np.asarray(copies[device]) for device in mesh.devices.flat]


def in_order(devices: list[Any]) -> list[Any]:
    """Sort devices by process and by their number on the host."""
    return sorted(devices, key=lambda d: (d.process_index, getattr(d, "local_hardware_id", None) or 0, d.id))


def begin(stage: str) -> None:
    """Tell the agent which stage begins, in a file: a crash may print more than the agent reads."""
    Path(sys.argv[2]).write_text(stage)


def main(processes: int) -> None:
    began = time.monotonic()
    if os.environ.get("JAX_PLATFORMS") == "cpu":  # each virtual device may hold a thread while it waits for the others
        os.environ.setdefault("PJRT_NPROC", str(2 * int(os.environ.get("JAX_NUM_CPU_DEVICES", "1")) + 2))
    begin("joining the other workers")
    if processes > 1:
        jax.distributed.initialize(sys.argv[4], processes, int(sys.argv[3]), initialization_timeout=90)
    begin("finding the devices")
    local, everyone = in_order(jax.local_devices()), in_order(jax.devices())
    sizes = ON_TPU if jax.default_backend() == "tpu" else ON_CPU
    mesh = Mesh(np.array(local), ("chip",))
    begin("matrix product")
    faults, tflops = check_products(mesh, sizes)
    begin("HBM")
    broken_memory, hbm_gb = check_memory(mesh, sizes)
    begin("all-reduce")
    first = everyone.index(local[0])
    found = [(first + index, message) for index, message in (*faults, *broken_memory)]
    found += check_all_reduce(Mesh(np.array(everyone), ("chip",)), sizes)
    starts = {device.process_index: i for i, device in reversed([*enumerate(everyone)])}
    answer = {
        "backend": jax.default_backend(),
        "local_devices": len(local),
        "devices": len(everyone),
        "kind": ", ".join(sorted({device.device_kind for device in local})),
        "process": jax.process_index(),
        "faults": [
            {"process": (at := everyone[index].process_index), "device": index - starts[at], "message": message}
            for index, message in found
        ],
        "tflops": round(tflops, 3),
        "hbm_gb": round(hbm_gb, 3),
        "seconds": round(time.monotonic() - began, 2),
    }
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
