"""Counts how many tokens a layer's router sends to every expert, without knowing the layer.

Knows: a router chooses with `topk` over its experts, one row per token. Does not know: models, or what is done with
the counts (`costs/routing.py`).

A layer may call `topk` for other purposes as well. A router's call has as many rows as the micro-batch has tokens and
takes a few of its columns; a call on a square matrix per sequence chooses keys for sparse attention. Of several such
calls (routers that choose groups of experts first), the one with the most columns chooses experts; of equals, the last.
A router that is one fused kernel is not seen. Neither is one that lets experts choose tokens, since its experts all
get equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octopipe.runtime.values import flatten

MOST_PER_TOKEN = 64
"""The most experts that one token may be sent to. Sparse attention chooses many more keys by `topk`."""


class RoutingRecorder:
    """Records the calls of `topk` during one forward of a layer."""

    def __init__(self) -> None:
        self._calls: list[tuple[int, int, Tensor]] = []

    def record(self, scores: Tensor, chosen: Tensor) -> None:
        attends = scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]
        if scores.dim() > 1 and chosen.shape[:-1] == scores.shape[:-1] and not attends:
            self._calls.append((scores.shape[:-1].numel(), scores.shape[-1], chosen.detach()))

    def tokens_per_expert(self, value: Any) -> tuple[float, ...]:
        """Return the counts for a layer whose input is `value`; empty if no router was found."""
        leaves: list[Any] = []
        flatten(value, leaves)
        rows = {t.shape[:-1].numel() for t in leaves if isinstance(t, Tensor) and t.dim() > 1 and t.is_floating_point()}
        found = [
            (experts, chosen)
            for count, experts, chosen in self._calls
            if count in rows and experts > 1 and 1 <= chosen.shape[-1] <= MOST_PER_TOKEN
        ]
        if not found:
            return ()
        most = max(experts for experts, _ in found)
        chosen = [chosen for experts, chosen in found if experts == most][-1]
        return tuple(float(n) for n in torch.bincount(chosen.flatten(), minlength=most).tolist())


@contextmanager
def recorded_routing() -> Iterator[RoutingRecorder]:
    """A context that records every call of `torch.topk` and `Tensor.topk`, from any thread."""
    recorder, called, method = RoutingRecorder(), torch.topk, torch.Tensor.topk

    def listening(choose: Callable[..., Any]) -> Callable[..., Any]:
        def topk(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            out = choose(scores, *args, **kwargs)
            recorder.record(scores, out[1])
            return out

        return topk

    torch.topk, torch.Tensor.topk = listening(called), listening(method)  # type: ignore[method-assign]
    try:
        yield recorder
    finally:
        torch.topk = called
        del torch.Tensor.topk  # it is the base class's
