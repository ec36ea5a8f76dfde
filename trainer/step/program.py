"""A program that a loop compiles, described apart from a run: the function and its arguments' shapes and shardings."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Mesh

from trainer.distributed import mesh as meshes


@dataclass(frozen=True)
class Program:
    """One compiled function.

    Attributes:
        name: update, logprob, decode, eval, ...; "resident" stands for what stays on the devices between programs.
        function: as `jax.jit` returned it, or with its `trace` and `lower`; None for `resident`.
        arguments: pytrees of `jax.ShapeDtypeStruct`, with shardings where they are arrays on the mesh.
        resident: other arrays that are on the devices while it runs.
        max_iterations: of a `while` loop's body, if the function has one.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...] = ()
    resident: Any = ()
    max_iterations: int = 1

    @property
    def argument_bytes(self) -> int:
        """Return the bytes per device of its arguments."""
        return sum(_bytes_per_device(x) for x in jax.tree.leaves(self.arguments))

    @property
    def resident_bytes(self) -> int:
        """Return the bytes per device of other resident arrays."""
        return sum(_bytes_per_device(x) for x in jax.tree.leaves(self.resident))

    def flops(self) -> float:
        """Return the floating-point operations of all matrix products on all devices, recomputation included.

        Counted on the traced program, since XLA counts a loop's body once. Products inside a kernel do not count.
        """
        if self.function is None:
            return 0.0
        return _flops(self.function.trace(*self.arguments).jaxpr.jaxpr, self.max_iterations)


def abstract_rows(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """Return an abstract array whose first axis is the batch."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=meshes.named_sharding(mesh, "batch"))


def _bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize


def _flops(jaxpr: Jaxpr, turns: int, experts: int = 1) -> float:
    """Count a program's operations. experts: devices that split them; each row is of a group on one of these."""
    return sum(_eqn_flops(eqn, turns, experts) for eqn in jaxpr.eqns)


def _eqn_flops(eqn: JaxprEqn, turns: int, experts: int) -> float:
    if eqn.primitive.name in ("dot_general", "ragged_dot_general"):
        ragged = eqn.params.get("ragged_dot_dimension_numbers")
        (contracted, _), _ = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
        left = eqn.invars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        out = eqn.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
        # each row is of one group: it is summed into one of them, or multiplied with the matrix of one
        groups = out[0] if ragged and ragged.lhs_ragged_dimensions[0] in contracted else 1
        return 2.0 * math.prod(out) * math.prod(left[i] for i in contracted) / groups / (experts if ragged else 1)
    if eqn.primitive.name == "pallas_call":
        return 0.0
    sizes = eqn.params["mesh"].shape if eqn.primitive.name == "shard_map" else {}
    experts *= sizes.get("expert", 1)
    inner = [_flops(sub, turns, experts) for value in eqn.params.values() for sub in _sub_jaxprs(value)]
    match eqn.primitive.name:
        case "scan":
            return sum(inner) * eqn.params["length"]
        case "while":
            return sum(inner) * turns
        case "cond":
            return max(inner)
        case "shard_map":
            return sum(inner) * math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"])
        case _:
            return sum(inner)


def _sub_jaxprs(value: Any) -> list[Jaxpr]:
    inner = getattr(value, "jaxpr", value)  # up to JAX 0.10 a ClosedJaxpr holds one, since 0.11 it is one
    if isinstance(inner, Jaxpr):
        return [inner]
    if isinstance(value, (tuple, list)):
        return [jaxpr for item in value for jaxpr in _sub_jaxprs(item)]
    return []
