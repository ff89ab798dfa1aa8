"""Chapter 5. The ledger: how many bytes a compiled program sends over which mesh axis.

You learn to read communication off the program instead of believing a comment. The compiled
HLO lists every collective with its shape and with the groups of devices that take part;
the coordinates in which the members of a group differ are the mesh axes it uses.

The payload of a collective, per device, is counted as in the core: the buffer of an all-reduce,
the gathered result of an all-gather, the full input of a reduce-scatter. XLA on CPU spells
a reduce-scatter as an all-reduce and a slice, so on the shard axis compare logical operations:
``written`` lists them where a program spells its messages out (chapters `simple_fsdp`, `manual`).

Who communicates: whoever you ask about.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from reference_jax.mesh import PER_REPLICA, make_mesh, pretend_devices, put

COLLECTIVE = re.compile(
    r" = (?P<shape>\(.*?\)|\S+) "
    r"(?P<op>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\("
)
TENSOR = re.compile(r"(?P<kind>pred|bf16|[sufc]\d+)\[(?P<sizes>[\d,]*)\]")


def payload_bytes(shape: str) -> int:
    """Bytes of an HLO shape, or of a tuple of them: ``(f32[4]{0}, f64[2,3]{1,0})``."""
    total = 0
    for tensor in TENSOR.finditer(shape):
        bits = "".join(c for c in tensor["kind"] if c.isdigit())
        sizes = _numbers(tensor["sizes"])
        total += int(np.prod(sizes, dtype=np.int64)) * (int(bits) // 8 if bits else 1)
    return total


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def _iota(shape: list[int], turn: list[int]) -> np.ndarray:
    grid = np.arange(np.prod(shape)).reshape(shape)
    return grid.transpose(turn or range(grid.ndim))


def device_groups(line: str) -> np.ndarray:
    """(groups, members) positions of devices in the mesh.

    Raises:
        ValueError: a spelling of groups that this function does not know.
    """
    named = re.search(
        r"replica_groups=mesh\[([^]]*)\]"
        r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}:]*)\}",
        line,
    )
    if named:  # mesh['a'=2,'b'=2] {'b'}: a grid of devices, and the axes inside a group
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        shape = list(sizes.values())
        grid = _iota(_numbers(named[2] or "") or shape, _numbers(named[3] or "")).reshape(shape)
        inside = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[4])]
        outside = [i for i in range(len(sizes)) if i not in inside]
        members = np.prod([shape[i] for i in inside])
        return grid.transpose(outside + inside).reshape(-1, members)
    tiled = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if tiled:  # [2,2]<=[4]T(1,0): 0..3 reshaped, transposed, cut into groups
        shape, grid_shape, turn = (_numbers(x or "") for x in tiled.groups())
        return _iota(grid_shape, turn).reshape(shape)
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}", line)
    if listed:  # {{0,1},{2,3}}
        return np.array([_numbers(row) for row in re.findall(r"\{([\d,]+)\}", listed[1])])
    raise ValueError(f"cannot read the device groups of: {line.strip()}")


def bytes_per_axis(compiled: Compiled, mesh: Mesh) -> dict[str, dict[str, int]]:
    """Axis -> operation -> payload bytes per device of one run of a compiled program.

    Args:
        compiled: ``jitted.lower(...).compile()``.
        mesh: the mesh it was compiled for. A collective over several axes at once is
            entered under their names joined by ``+``.
    """
    sent: dict[str, dict[str, int]] = {}
    for line in (compiled.as_text() or "").splitlines():
        found = COLLECTIVE.search(line)
        if not found:
            continue
        groups = device_groups(line)
        where = np.stack(np.unravel_index(groups, mesh.devices.shape))  # [axis, group, member]
        varies = (where != where[:, :, :1]).any(axis=(1, 2))
        axis = "+".join(name for name, v in zip(mesh.axis_names, varies, strict=True) if v)
        if axis:
            size = payload_bytes(found["shape"])
            size *= groups.shape[1] if found["op"] == "reduce-scatter" else 1
            of_axis = sent.setdefault(axis, {})
            of_axis[found["op"]] = of_axis.get(found["op"], 0) + size
    return sent


WRITTEN = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum": "all-reduce"}


def written(program: Callable[..., Any], *args: Any) -> Iterator[tuple[str, str, int]]:
    """(axis, operation, payload bytes) of every collective in the jaxpr of ``program(*args)``.

    These are the words of the program, before any compiler; those of the backward included.
    """
    queue = [jax.make_jaxpr(program)(*args).jaxpr]
    while queue:
        for equation in queue.pop().eqns:
            if operation := WRITTEN.get(equation.primitive.name):
                params = equation.params
                axes = params["axes" if operation == "all-reduce" else "axis_name"]
                payload = equation.outvars if operation == "all-gather" else equation.invars
                size = sum(x.aval.size * x.aval.dtype.itemsize for x in payload)
                yield "+".join(axes), operation, size
            inner = jax.tree.leaves(list(equation.params.values()))
            queue += [getattr(x, "jaxpr", x) for x in inner if hasattr(x, "eqns")]


def written_bytes(program: Callable[..., Any], *args: Any) -> dict[str, dict[str, int]]:
    """Axis -> operation -> bytes, as ``bytes_per_axis``, of what is written."""
    sent: dict[str, dict[str, int]] = {}
    for axis, operation, size in written(program, *args):
        of_axis = sent.setdefault(axis, {})
        of_axis[operation] = of_axis.get(operation, 0) + size
    return sent


def main() -> None:
    """The bytes of sums over nothing, over shards, and over replicas."""
    pretend_devices(4)
    mesh = make_mesh(2, 2)
    questions = {
        "squares (elementwise)": jnp.square,
        "norm of each replica": jax.vmap(lambda x: jnp.square(x).sum()),
        "mean over replicas": lambda x_R: x_R.mean(axis=0),
    }
    with jax.set_mesh(mesh):
        x_R = put(np.ones((2, 4, 8), np.float32), mesh, PER_REPLICA)
        for name, f in questions.items():
            compiled = jax.jit(f).lower(x_R).compile()
            print(f"{name:22} {bytes_per_axis(compiled, mesh)}")
    print("a shard of one replica has 2 x 8 x 4 = 64 bytes")


if __name__ == "__main__":
    main()
