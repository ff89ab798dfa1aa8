"""Probes of everything private that Twinshard takes from PyTorch: does each still do its duty?

A new version of torch fails here, by name, before it fails anywhere else.
"""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.fx import Graph, GraphModule

from core_torch.shard import compat
from core_torch.tests.test_house_rules import CORE_FILES, imported, is_test, tree_of

CHECKED_VERSION = "2.13"


def test_torch_is_the_version_that_was_checked() -> None:
    assert torch.__version__.startswith(f"{CHECKED_VERSION}."), "run and read every probe here"
    stated = (compat.__doc__ or "").split("Checked on torch ")[1]
    assert stated.startswith(CHECKED_VERSION)


def test_every_private_import_has_a_probe() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    names = [*compat.__all__, *compat._LATE]
    assert not [name for name in names if f"compat.{name}" not in text]
    tree = ast.parse(inspect.getsource(compat))
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    taken = [a.asname or a.name for n in froms for a in n.names if n.module != "typing"]
    assert set(taken) <= set(names)


def test_the_compiler_is_not_imported_before_it_is_used() -> None:
    code = (
        "import sys, core_torch.shard.compat; sys.exit('torch._inductor.compile_fx' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=120).returncode == 0


@pytest.mark.parametrize("path", [p for p in CORE_FILES if not is_test(p)], ids=lambda p: p.name)
def test_no_other_file_imports_what_torch_keeps_private(path: Path) -> None:
    if path.name == "compat.py":
        return
    private = [
        (line, module)
        for line, module in imported(tree_of(path))
        if module.startswith(("torch.", "functorch."))
        and any(part.startswith("_") for part in module.split("."))
    ]
    assert not private


def test_a_fake_group_has_all_its_ranks_in_one_process_and_moves_nothing() -> None:
    dist.init_process_group("fake", store=compat.FakeStore(), rank=5, world_size=64)
    try:
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (5, 64, "fake")
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def test_fake_tensors_have_shapes_and_take_no_memory() -> None:
    with compat.FakeTensorMode():
        huge = torch.zeros(1 << 30, 1 << 10)
        assert (huge @ huge.T[:, :3]).shape == (1 << 30, 3) and huge.device.type == "cpu"


def test_the_mode_of_fake_tensors_is_found() -> None:
    mode = compat.FakeTensorMode()
    assert compat.detect_fake_mode([mode.from_tensor(torch.ones(2))]) is mode
    assert compat.detect_fake_mode([torch.ones(2)]) is None


def test_strided_shards_tell_how_often_tensor_parallelism_cut_before() -> None:
    placement = compat.StridedShard(0, split_factor=2)
    assert (placement.dim, placement.split_factor) == (0, 2) and placement != Shard(0)


def test_recomputing_what_is_cheap_lifts_three_bans_of_the_partitioner_and_restores_them() -> None:
    def bans() -> set[bool]:
        config = torch._functorch.config
        return {
            config.ban_recompute_used_far_apart,
            config.ban_recompute_long_fusible_chains,
            config.ban_recompute_materialized_backward,
        }

    before = bans()
    with compat.recompute_what_is_cheap():
        assert bans() == {False}
    assert bans() == before == {True}


def test_cuda_graphs_are_switched_off_by_a_boxed_truth_value() -> None:
    assert not compat.BoxedBool(False)


def test_outside_of_a_compilation_no_input_is_donated() -> None:
    assert compat.donated_inputs() == []


def test_decompositions_are_a_table_of_operators() -> None:
    table = compat.select_decomp_table()
    assert torch.ops.aten.silu_backward.default in table


def test_autograd_is_traced_and_parted_in_forward_and_backward() -> None:
    seen: dict[str, Any] = {}

    def compiler(name: str) -> Any:
        def compile_graph(module: GraphModule, inputs: Any) -> Any:
            if name == "backward":
                seen["donated"] = compat.donated_inputs()
            seen[name] = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]

            def run(args: list[Any]) -> Any:
                return module(*args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return compile_graph

    backend = compat.aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=compat.min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        return (y @ y).sin().sum()

    grads = []
    for run in (function, torch.compile(function, backend=backend, fullgraph=True)):
        x = torch.tensor([[0.3, 1.0], [-2.0, 0.5]], requires_grad=True)
        run(x).backward()
        assert x.grad is not None
        grads.append(x.grad)
    assert torch.allclose(grads[0], grads[1])
    assert seen["donated"], "what the forward saves is the backward's to overwrite"
    assert "aten.sin.default" in seen["forward"] and "aten.cos.default" in seen["backward"]


def test_a_graph_is_compiled_to_kernels_inside_a_tracing_context_of_its_own() -> None:
    mode, graph = compat.FakeTensorMode(), Graph()
    value = mode.from_tensor(torch.ones(4))
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.add.Tensor, (x, 1.0))
    x.meta["val"] = y.meta["val"] = value
    result = graph.output((y,))
    result.meta["user_visible_output_idxs"] = [0]
    result.meta["original_output_strides"] = [(1,)]
    with compat.tracing(compat.TracingContext(mode)):
        run = compat.compile_fx_inner(
            GraphModule(torch.nn.Module(), graph),
            [value],
            cudagraphs=compat.BoxedBool(False),
            is_inference=True,
        )
    given = [torch.zeros(4)]
    [total] = run(given)
    assert total.tolist() == [1.0] * 4
    assert given == [], "inputs are freed as the kernels go"


def test_graphs_are_counted_when_torch_compiles_one_and_not_when_it_runs_again() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    before, compiled = compat.graphs_compiled(), torch.compile(double, backend="eager")
    compiled(torch.ones(2))
    assert compat.graphs_compiled() == before + 1
    compiled(torch.zeros(2))
    assert compat.graphs_compiled() == before + 1
