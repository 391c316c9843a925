"""Every private name of PyTorch that the runtime uses is there, does what is expected of it, and stands in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from octopipe.runtime import torch_private as private  # noqa: E402

RUNTIME = Path(private.__file__).parent


class Noting(TorchFunctionMode):
    """Notes the functions that it meets."""

    def __init__(self):
        super().__init__()
        self.met = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.met.append(function)
        return function(*args, **(kwargs or {}))


def test_a_mode_is_pushed_and_taken_off_by_hand():
    mode = Noting()
    assert private.function_mode_stack() == []
    private.push_function_mode(mode)
    assert private.function_mode_stack() == [mode]
    torch.ones(1) + 1
    private.pop_function_mode()
    assert mode.met and private.function_mode_stack() == []


def test_no_mode_sees_a_call_that_is_hidden_from_it():
    with Noting() as mode, private.WithoutFunctionModes():
        torch.ones(1) + 1
    assert mode.met == []


def test_no_grad_is_met_as_the_function_that_it_calls():
    with Noting() as mode, torch.no_grad():
        pass
    assert private.set_grad_enabled in mode.met


def test_autocast_functorch_forward_mode_and_saved_tensor_hooks_are_seen():
    assert not private.is_autocast_on()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert private.is_autocast_on()
    seen = []
    assert not private.is_functorch_active()
    torch.func.vmap(lambda x: (seen.append(private.is_functorch_active()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert private.forward_mode_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert private.forward_mode_level() == 0
    assert private.top_saved_tensor_hooks is not None and private.top_saved_tensor_hooks(True) is None
    with saved_tensors_hooks(lambda x: x, lambda x: x):
        assert private.top_saved_tensor_hooks(True) is not None


def test_the_engine_says_which_call_runs_and_which_nodes_it_will_execute():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product, other = x * 2, y * 2
    seen = {}

    def look(gradient):
        seen["task"] = private.engine_task_id()
        seen["mine"] = private.will_engine_execute(product.grad_fn)
        seen["other"] = private.will_engine_execute(other.grad_fn)

    assert private.engine_task_id() == -1
    total = product.sum()
    total.register_hook(look)
    total.backward()
    assert seen["task"] >= 0 and seen["mine"] and not seen["other"]


@pytest.mark.parametrize("name", ["engine_run_backward", "run_engine"])
def test_backward_by_hand_is_backward(name):
    x = torch.ones(3, requires_grad=True)
    y = (x * torch.tensor([1.0, 2.0, 3.0])).sum()
    one = (torch.ones(()),)
    if name == "engine_run_backward":
        private.engine_run_backward((y,), one, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        private.run_engine((y,), one, False, False, (), True, True)
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


def test_nodes_of_functions_in_python_are_told_apart():
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g

    x = torch.ones(1, requires_grad=True)
    assert isinstance(Same.apply(x).grad_fn, private.PythonFunctionNode)
    assert not isinstance((x * 2).grad_fn, private.PythonFunctionNode)


def test_grouped_products_are_products_of_groups():
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    weight = torch.randn(2, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    try:
        found = private.grouped_mm(x, weight, offs=ends)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this build has it for CUDA only: {error}")
    wanted = torch.cat([x[:3] @ weight[0], x[3:] @ weight[1]])
    assert torch.allclose(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_another_shape_of_a_result_may_be_changed_in_place():
    """Megatron's cross entropy does this; with a view that a function has made, autograd forbids it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = 2 * x
            return private.unsafe_view(out, out.shape)

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    out = Twice.apply(x)
    out -= 1.0
    out.sum().backward()
    assert out.tolist() == [1.0] * 3 and x.grad.tolist() == [2.0] * 3


def test_lists_of_tensors_are_copied_and_zeroed():
    here, there = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    private.foreach_copy_(here, there)
    assert [t.tolist() for t in here] == [[1, 1], [2, 2, 2]]
    private.foreach_zero_(here)
    assert all(not t.any() for t in here)


def test_a_storage_counts_its_users():
    tensor = torch.ones(4)
    storage = tensor.untyped_storage()
    before = private.storage_use_count(storage._cdata)
    view = tensor.view(2, 2).detach()
    assert private.storage_use_count(storage._cdata) == before + 1
    del view
    assert private.storage_use_count(storage._cdata) == before


def test_flash_attention_on_the_host_is_attention():
    forward, backward = private.flash_attention_on_host()
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    given = [t.detach() for t in (q, k, v)]
    out, lse = forward(*given, 0.0, True, scale=16**-0.5)[:2]
    assert torch.allclose(out, wanted, atol=1e-5)
    g = torch.randn_like(out)
    wanted.backward(g)
    for found, t in zip(backward(g, *given, out, lse, 0.0, True, scale=16**-0.5), (q, k, v), strict=True):
        assert torch.allclose(found, t.grad, atol=1e-4)


def test_flash_attention_on_a_device_takes_what_it_took():
    forward, backward = private.flash_attention_on_device()
    names = [a.name for a in forward.default._schema.arguments]
    assert names[:10] == [
        "query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
        "return_debug_mask",
    ] and {"scale", "window_size_left", "window_size_right"} <= set(names)  # fmt: skip
    names = [a.name for a in backward.default._schema.arguments]
    assert names[:6] == ["grad_out", "query", "key", "value", "out", "logsumexp"] and "window_size_left" in names


def test_a_scaled_product_takes_two_scales_and_the_dtype_of_its_result():
    names = [a.name for a in torch.ops.aten._scaled_mm.default._schema.arguments]
    assert names[:4] == ["self", "mat2", "scale_a", "scale_b"] and {"out_dtype", "use_fast_accum"} <= set(names)
    assert private.scaled_mm is torch._scaled_mm


def test_the_memory_that_products_keep_can_be_freed():
    private.clear_blas_workspaces()
    if torch.cuda.is_available():
        before, a = torch.cuda.memory_allocated(), torch.ones(8, 8, device="cuda")
        a.mm(a)
        del a
        private.clear_blas_workspaces()
        assert torch.cuda.memory_allocated() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_pool_is_left_after_a_capture_that_broke_off():
    assert callable(torch._C._cuda_endAllocateToPool)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_handle_of_the_current_stream_is_its_own():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert private.current_raw_stream(stream.device.index) == stream.cuda_stream


@pytest.mark.slow
def test_the_compiler_loads_with_its_settings():
    """In a process of its own: other tests need not carry it."""
    code = (
        "import sys; from octopipe.runtime import torch_private as p\n"
        "assert hasattr(p.inductor_config(), 'triton'); p.load_compiler(); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr[-500:]


def test_global_hooks_on_forwards_are_seen():
    assert not private.has_global_forward_hooks()
    handle = nn.modules.module.register_module_forward_hook(lambda *a: None)
    assert private.has_global_forward_hooks()
    handle.remove()
    assert not private.has_global_forward_hooks()


def test_global_hooks_of_both_directions_are_seen():
    hooks = nn.modules.module
    assert not private.has_global_hooks()
    for register in (hooks.register_module_forward_pre_hook, hooks.register_module_full_backward_hook):
        handle = register(lambda *a: None)
        assert private.has_global_hooks()
        handle.remove()
    assert not private.has_global_hooks()


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_groups_their_store_and_their_numbers_are_found(one_rank):
    store = private.default_store()
    store.set("octopipe/test", "1")
    assert store.get("octopipe/test") == b"1"
    assert one_rank in private.known_groups()
    before = one_rank._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    assert one_rank._get_sequence_number_for_group() >= before
    backend = one_rank._get_backend(torch.device("cpu"))
    assert backend.options._timeout.total_seconds() > 0


def test_a_mesh_is_flattened(one_rank):
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert mesh["a", "b"]._flatten().size() == 1


def test_sharded_modules_say_which_ranks_hold_them(one_rank):
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    assert ([state._fsdp_param_group] if groups is None else list(groups))[0].mesh_info is not None


def test_functional_collectives_have_the_exchange_of_experts():
    module = private.functional_collectives()
    assert callable(module.all_to_all_single) and callable(module.all_to_all_single_autograd)


def test_trees_are_taken_apart_and_put_together():
    leaves, spec = private.pytree.tree_flatten({"a": [1, (2, 3)]})
    assert leaves == [1, 2, 3] and private.pytree.tree_unflatten(leaves, spec) == {"a": [1, (2, 3)]}


def test_tensors_modules_and_nodes_have_their_attributes():
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).view(2, 1)
    assert y._is_view() and y._base is not None and x._version == 0 and x._backward_hooks is None
    assert not x._post_accumulate_grad_hooks
    x.register_post_accumulate_grad_hook(lambda t: None)
    assert x._post_accumulate_grad_hooks
    assert tuple(y.grad_fn._input_metadata[0].shape) == (2, 1)
    module = nn.Sequential(nn.Linear(2, 2))
    assert all(hasattr(module, name) for name in private.ATTRIBUTES["module"])
    assert torch.compile(module)._orig_mod is module
    assert hasattr(torch.amp.GradScaler, "_unscale_grads_")


# -- one file -----------------------------------------------------------------------------------------------------


def _dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)]


def _is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(text):
    """Private names that a module reaches through a name it imported from torch."""
    tree, ours, found = ast.parse(text), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            ours |= {(a.asname or a.name).split(".")[0]: a.name for a in node.names if a.name.split(".")[0] == "torch"}
            found += [
                a.name for a in node.names if a.name.startswith("torch.") and any(map(_is_private, a.name.split(".")))
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for a in node.names:
                ours[a.asname or a.name] = f"{node.module}.{a.name}"
                if any(map(_is_private, f"{node.module}.{a.name}".split("."))):
                    found.append(f"{node.module}.{a.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names = _dotted(node)
            if names[0] in ours and any(map(_is_private, names[1:])):
                found.append(".".join(names))
    return sorted(set(found))


def test_the_search_for_private_names_finds_them():
    text = "import torch\nfrom torch.utils import _pytree as t\ntorch._C._x()\ntorch.nn.Linear\nself._mine\n"
    assert private_names(text) == ["torch._C", "torch._C._x", "torch.utils._pytree"]


def test_no_other_module_of_the_package_names_a_private_one():
    package = RUNTIME.parent
    wrong = {
        str(path.relative_to(package)): names
        for path in sorted(package.rglob("*.py"))
        if path.name != "torch_private.py" and "torch" in (text := path.read_text()) and (names := private_names(text))
    }
    assert wrong == {}
