"""Transports: how the output or gradient of a stage is sent to another rank."""

from __future__ import annotations

import torch

from octopipe.base.errors import OctoPipeError
from octopipe.runtime.ranks.gpu_share import check_products, has_share
from octopipe.runtime.ranks.world import World
from octopipe.runtime.wire.transports.base import TransferError, Transport
from octopipe.simulation.lowering import Program

NAMES = ("gloo", "nccl", "cuda_ipc", "strict")


def make_transport(
    wanted: str | Transport | None, world: World, program: Program, device: torch.device, timeout_s: float
) -> Transport:
    """A transport by name, or the one that fits the device (collective over the pipeline's ranks)."""
    if has_share():
        check_products(device)
    if isinstance(wanted, Transport):
        return wanted
    if world.group is None:
        from octopipe.runtime.wire.transports.alone import NoTransport

        return NoTransport()
    name = wanted or ("nccl" if device.type == "cuda" else "gloo")
    if name == "gloo":
        from octopipe.runtime.wire.transports.gloo import GlooTransport

        if device.type != "cpu":
            raise OctoPipeError(f"the gloo transport moves CPU tensors, the pipeline is on {device}; use nccl")
        return GlooTransport(world, timeout_s=timeout_s)
    if name == "strict":
        from octopipe.runtime.wire.transports.strict import StrictTransport

        return StrictTransport(world, program, timeout_s=timeout_s)
    if name == "cuda_ipc":
        from octopipe.runtime.wire.transports.cuda_ipc import IpcTransport

        return IpcTransport(world, device, timeout_s=timeout_s)
    if name == "nccl":
        from octopipe.runtime.wire.transports.nccl import NcclTransport

        if device.type != "cuda":
            raise OctoPipeError(f"the nccl transport moves CUDA tensors, the pipeline is on {device}; use gloo")
        return NcclTransport(world, device, directed=program.channel == "directed", timeout_s=timeout_s)
    raise OctoPipeError(f"unknown transport {name!r}; one of {', '.join(NAMES)}")


__all__ = ["NAMES", "TransferError", "Transport", "make_transport"]
