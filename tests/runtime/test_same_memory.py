"""Weights of layers on different ranks in one memory: only those that have an element in common are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.runtime.ranks.same_memory import refuse_shared_memory  # noqa: E402


def layer_of(*tensors: torch.Tensor) -> nn.Module:
    layer = nn.Module()
    for number, tensor in enumerate(tensors):
        layer.register_parameter(f"w{number}", nn.Parameter(tensor))
    return layer


def test_thousands_of_weights_side_by_side_in_one_buffer_are_compared_at_once() -> None:
    """4,000 weights: comparing every pair of them element by element would take an hour."""
    flat = torch.zeros(4_000_000)
    layers = [layer_of(*flat[k * 1_000_000 : (k + 1) * 1_000_000].split(1000)) for k in range(4)]
    refuse_shared_memory(layers, {k: {k} for k in range(4)}, {})


@pytest.mark.parametrize("width", [2, 3])
def test_interleaved_parts_of_a_weight_have_nothing_in_common(width: int) -> None:
    whole = torch.zeros(6, 2 * width)
    layers = [layer_of(whole[:, :width]), layer_of(whole[:, width:])]
    refuse_shared_memory(layers, {0: {0}, 1: {1}}, {})
    columns = [layer_of(whole[:, ::2]), layer_of(whole[:, 1::2])]
    refuse_shared_memory(columns, {0: {0}, 1: {1}}, {})


@pytest.mark.parametrize("before", [0, 7])
def test_a_common_element_is_refused_by_name_wherever_it_lies(before: int) -> None:
    flat = torch.zeros(100)
    parts = [flat[before + 10 : before + 20], flat[before + 30 : before + 40], flat[before + 39 : before + 50]]
    layers = [layer_of(parts[0]), layer_of(parts[1]), layer_of(parts[2])]
    with pytest.raises(OctoPipeError, match=r"1\.w0 and 2\.w0 are two tensors that share memory"):
        refuse_shared_memory(layers, {0: {0}, 1: {0}, 2: {1}}, {})
    refuse_shared_memory(layers, {0: {0}, 1: {1}, 2: {1}}, {})  # on one rank, they share it there too
    refuse_shared_memory(layers, {0: {0}, 1: {0}, 2: {1}}, {"2.w0": "1.w0"})


def test_the_same_memory_in_another_dtype_is_refused() -> None:
    flat = torch.zeros(8)
    layers = [layer_of(flat), layer_of(flat.view(torch.float64))]
    with pytest.raises(OctoPipeError, match="share memory"):
        refuse_shared_memory(layers, {0: {0}, 1: {1}}, {})
