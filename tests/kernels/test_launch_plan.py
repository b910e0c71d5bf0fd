"""Calls by plan: what they may share, when they are not taken, and torch.compile, which never sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kerneltune.kernels import launch_plan, tables
from kerneltune.kernels.mla_decode import custom_op, mla_decode
from kerneltune.kernels.moe import fused_moe
from kerneltune.kernels.tunable import KernelCall
from kerneltune.registry import load_tunable

MLA: dict[str, Any] = {"dtype": "fp16", "heads": 4, "page_size": 16, "batch": 2, "kv_len": 48}
MOE: dict[str, Any] = {"dtype": "fp16", "E": 4, "global_E": 4, "N": 32, "K": 64, "top_k": 2, "tokens": 5}
SPLITS = {"BLOCK_H": 16, "BLOCK_N": 16, "num_splits": 3, "num_warps": 4, "num_stages": 1}
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 2, "num_stages": 1}


def mla_inputs(device: str, **changes: Any) -> list[torch.Tensor]:
    tunable = load_tunable("mla-decode")
    inputs = tunable.make_problem(tunable.complete_workload(MLA | changes), device).inputs
    return [inputs[name] for name in ("q", "kv_cache", "block_table", "cache_seqlens")]


def moe_inputs(device: str, **changes: Any) -> list[torch.Tensor]:
    tunable = load_tunable("moe")
    inputs = tunable.make_problem(tunable.complete_workload(MOE | changes), device).inputs
    return [inputs[name] for name in ("hidden", "w1", "w2", "topk_weights", "topk_ids")]


def test_scratch_lies_apart_and_aligned_in_one_workspace() -> None:
    layout = {"a": ((3, 5), torch.float32), "b": ((1,), torch.int32), "c": ((7,), torch.float16)}
    parts, offsets, workspace = launch_plan.carve(layout, torch.device("cpu"))
    assert [parts[name].shape for name in layout] == [(3, 5), (1,), (7,)]
    assert all(offset % launch_plan.ALIGNMENT == 0 for offset in offsets)
    for value, part in enumerate(parts.values()):
        part.fill_(value + 1)
    assert [set(part.flatten().tolist()) for part in parts.values()] == [{1.0}, {2}, {3.0}]
    base = workspace.data_ptr()
    assert [part.data_ptr() - base for part in parts.values()] == list(offsets)
    assert launch_plan.carve({}, torch.device("cpu"))[1:2] == ((),)


def compiled_call(kernel: str, config: dict[str, Any] | None, with_out: bool, device: str) -> tuple[Any, list[Any]]:
    if kernel == "moe":
        given = None if config is None else {"gemm1": TILE, "gemm2": TILE}
        tensors = moe_inputs(device)

        def call(*tensors: torch.Tensor) -> Any:
            out = torch.empty_like(tensors[0]) if with_out else None
            return fused_moe(*tensors, config=given, out=out) * 2
    else:
        tensors = mla_inputs(device)

        def call(*tensors: torch.Tensor) -> Any:
            q = tensors[0]
            out = q.new_empty(q.shape[0], 1, 4, 512) if with_out else None
            result, lse = mla_decode(*tensors, softmax_scale=0.1, config=config, out=out)
            return result * 2, lse + 1

    return call, tensors


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("config", [None, SPLITS])
@pytest.mark.parametrize("kernel", ["mla-decode", "moe"])
def test_torch_compile_takes_the_op_whole(kernel: str, config: Any, with_out: bool, device: str) -> None:
    call, tensors = compiled_call(kernel, config, with_out, device)
    eager = call(*tensors)
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = torch.compile(call, backend=backend, fullgraph=True)(*tensors)
    for got, wanted in zip(*((x if isinstance(x, tuple) else (x,)) for x in (compiled, eager)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_the_custom_operators_are_sound(device: str) -> None:
    q, kv, table, lengths = mla_inputs(device)
    words = [f"{name}={value}" for name, value in SPLITS.items()]
    arguments = (q, kv, table, lengths, 0.1, False, 512, float("-inf"), None, words, None, None)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kerneltune.mla_decode.default, arguments, test_utils=tests)
    hidden, w1, w2, weights, ids = moe_inputs(device)
    more = (hidden, w1, w2, weights, ids, None, "silu", None, None, None)
    torch.library.opcheck(torch.ops.kerneltune.fused_moe.default, more, test_utils=tests)
    torch.library.opcheck(
        torch.ops.kerneltune.fused_moe_out.default, (*more, torch.empty_like(hidden)), test_utils=tests
    )


def test_an_eager_call_never_enters_the_custom_operators(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one alone costs microseconds."""
    monkeypatch.setattr(custom_op, "call", lambda *arguments: pytest.fail("entered"))
    mla_decode(*mla_inputs(device), softmax_scale=0.1)


def test_a_table_can_be_named_at_the_call(device: str, tmp_path: Any) -> None:
    with pytest.warns(UserWarning, match="no table there"):
        fused_moe(*moe_inputs(device), table=tmp_path / "none.json")
    tables._said.clear()
    tables.forget()


CHILD = """
import sys, torch
sys.path.insert(0, {folder!r})
import test_launch_plan as t

def work(queue):
    out, lse = t.mla_decode(*t.mla_inputs({device!r}), softmax_scale=0.1, config=t.SPLITS)
    queue.put((out.float().sum().item(), t.fused_moe(*t.moe_inputs({device!r})).float().sum().item()))

if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context({method!r})
    queue = context.Queue()
    children = [context.Process(target=work, args=(queue,)) for _ in range(2)]
    for child in children: child.start()
    print(*sorted(str(queue.get(timeout=240)) for _ in children))
    for child in children: child.join()
    sys.exit(max(child.exitcode for child in children))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_in_children_that_were_forked_or_spawned(method: str, device: str, tmp_path: Any) -> None:
    """The parent has imported everything but, as CUDA demands of a fork, not touched the GPU."""
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(folder=os.path.dirname(__file__), device=device, method=method))
    environment = os.environ | ({} if device == "cuda" else {"TRITON_INTERPRET": "1"})
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.strip().replace(") (", ")|(").split("|")
    assert first == second


def test_a_plan_moves_tma_descriptors_to_the_new_addresses() -> None:
    """Without a GPU: a stand-in for the compiled kernel takes down what it is launched with."""
    launched: list[tuple[Any, ...]] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        @staticmethod
        def run(*arguments: Any) -> None:
            launched.append(arguments)

    class Function:
        arg_names = ("desc", "x_ptr", "n")

    x, y = torch.zeros(64, 64, dtype=torch.float16), torch.ones(4)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    descriptor = TensorDescriptor(x, [64, 64], [64, 1], [64, 64], layout)
    call = KernelCall(Function, (3,), (descriptor, y), {"n": 7})
    bound = launch_plan._bind(call, Compiled, [x, y])
    plan = launch_plan.Plan((bound,), 0, 0, (), lambda device: "stream")
    assert plan.launch([4096, 8192], None)
    assert plan.launch([65536, 8192], None)
    for arguments, address in zip(launched, (4096, 65536), strict=True):
        *head, moved, pointer, n = arguments
        assert head == [3, 1, 1, "stream", "function", "metadata", None, None, None]
        assert (moved.base.data_ptr(), pointer, n) == (address, 8192, 7)
        assert (moved.shape, moved.strides, moved.block_shape) == ([64, 64], [64, 1], [64, 64])
    assert descriptor.base is x
    assert not plan.launch([4104, 8192], None)  # no multiple of 16 bytes: Triton's own way
