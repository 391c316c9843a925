"""From a `ModelSpec` to modules: one factory per layer, so that a rank builds only its own.

Knows: which module implements which layer kind and how its parameters are initialised. Does not know: plans or ranks.
The initialisation of a layer depends only on the seed, its index and the kind of device, not on the rank that builds it
or on what was built before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.models import layers, mixers
from octopipe.models.spec import ModelSpec
from octopipe.runtime.nn import basic
from octopipe.runtime.nn.attention import Attention, LatentAttention
from octopipe.runtime.nn.delta import GatedDeltaNet
from octopipe.runtime.nn.head import Head
from octopipe.runtime.nn.kernels import Kernels, fla_delta_scan, flash_attend, mamba_ssm_mix
from octopipe.runtime.nn.mamba import LightningAttention, Mamba1, Mamba2, compiled_mamba2_mix, mamba2_mix
from octopipe.runtime.nn.moe import Moe

_SIMPLE: dict[type, Callable[..., nn.Module]] = {
    layers.Mlp: basic.Mlp,
    layers.Moe: Moe,
    mixers.Attention: Attention,
    mixers.LatentAttention: LatentAttention,
    mixers.Mamba1: Mamba1,
    mixers.Mamba2: Mamba2,
    mixers.GatedDeltaNet: GatedDeltaNet,
    mixers.LightningAttention: LightningAttention,
}


def build_layers(
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    lean_head: bool = True,
    kernels: Kernels | None = None,
) -> list[Callable[[], nn.Module]]:
    """One factory per layer of `spec`.

    `lean_head`: the head leaves the projection to `cross_entropy`. `kernels`: the implementations of scans, attention
    and loss (default: plain torch). They replace only what lies between a mixer's projections, so the weight gradients
    of the projections are split as without them.
    """
    for i, layer in enumerate(spec.layers):
        _check(spec, i, layer)
    last = spec.layers[-1]
    tied = isinstance(last, layers.Head) and last.tied
    kernels = kernels or Kernels()
    mixes: dict[str, Callable[[], Callable[..., Tensor]]]
    mixes = {"compiled": compiled_mamba2_mix, "mamba_ssm": mamba_ssm_mix, "eager": lambda: mamba2_mix}
    mix = mixes[kernels.scan]()
    scan = fla_delta_scan() if kernels.delta == "fla" else None
    attended = flash_attend() if kernels.attention == "flash_attn" else None
    build = partial(_build, spec, tied, dtype=dtype, device=torch.device(device), seed=seed, lean=lean_head, mix=mix)
    build = partial(build, scan=scan, attended=attended, loss=kernels.loss)
    return [partial(build, i) for i in range(spec.num_layers)]


def tie(modules: Iterable[nn.Module]) -> None:
    """Replace parameters of the same tie name by the first of them, for modules in one process."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, key in getattr(module, "tied_to", {}).items():
            setattr(module, name, first.setdefault(key, getattr(module, name)))


def _check(spec: ModelSpec, index: int, layer: layers.Layer) -> None:
    if isinstance(layer, layers.Mtp) or (isinstance(layer, layers.Head) and layer.predictions > 1):
        raise OctoPipeError(
            f"{spec.name}: layer {index} predicts several tokens, which octopipe.runtime.nn has no module for; "
            "use spec.without_mtp()"
        )
    for part in layer.parts:
        if not isinstance(part, (*_SIMPLE, layers.Embedding, layers.Head)):
            raise OctoPipeError(
                f"{spec.name}: layer {index} is a {part.kind}, for which octopipe.runtime.nn has no module; "
                "pass your own modules"
            )


def _build(
    spec: ModelSpec,
    tied: bool,
    index: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    lean: bool,
    mix: Callable[..., torch.Tensor],
    scan: Callable[..., torch.Tensor] | None,
    attended: Callable[..., torch.Tensor] | None,
    loss: str,
) -> nn.Module:
    layer = spec.layers[index]
    made: basic.Made = {"dtype": dtype, "device": device}
    module: nn.Module
    if isinstance(layer, layers.Embedding):
        module = basic.Embedding(layer, made, tied)
    elif isinstance(layer, layers.Head):
        module = Head(layer, spec.norm_eps, made, lean)
        module.loss_kind = loss
    elif isinstance(layer, layers.Block):
        mixer, ffn = (_SIMPLE[type(part)](part, spec.norm_eps, made) for part in layer.parts)
        module = basic.Block(mixer, ffn)
    else:
        module = _SIMPLE[type(layer)](layer, spec.norm_eps, made)
    for part in module.modules():
        if isinstance(part, Mamba2):
            part.mix = mix
        elif isinstance(part, GatedDeltaNet):
            part.narrow_scan = scan
        elif isinstance(part, Attention) and attended is not None:
            part.attend = attended
    with torch.no_grad():
        _start(module, _generator(seed, index, device), spec.num_layers)
        if tied and isinstance(module, Head):  # the values of layer 0's embedding, without communication
            module.weight.normal_(std=0.02, generator=_generator(seed, 0, device))
    return module


def _generator(seed: int, index: int, device: torch.device) -> torch.Generator:
    mixed = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & (2**63 - 1)
    return torch.Generator(device).manual_seed(mixed)


def _start(module: nn.Module, generator: torch.Generator, num_layers: int) -> None:
    """Initialise matrices from a normal distribution (smaller with depth for those that write to the residual stream),
    norms with one and biases with zero."""
    for name, parameter in module.named_parameters():
        last = name.rsplit(".", 2)
        if parameter.ndim >= 2:
            writes = "out" in last or "down" in last or "shared_down" in last
            parameter.normal_(std=0.02 / (2 * num_layers) ** 0.5 if writes else 0.02, generator=generator)
        elif last[-1].endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1)
    for part in module.modules():
        if isinstance(part, basic.Residual):
            part.special_init(generator)
