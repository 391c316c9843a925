"""The auxiliary loss of routers: router logits of every layer are passed to the head, where the model's own code sums
them.

Knows: which modules of a family are routers (from transformers' own table for recording outputs), how their logits are
passed to the head's forward, and the factor with which that forward adds their loss. Does not know: pipelines. Only
models whose config sets `output_router_logits` use it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.shell import text_config


def routers_of(model: nn.Module) -> Routers | None:
    """The model's routers if the model trains with their auxiliary loss, otherwise None."""
    if not getattr(text_config(model), "output_router_logits", False) or not _adds_a_loss(model):
        return None
    if getattr(model.config, "is_encoder_decoder", False):
        raise OctoPipeError(
            f"{type(model).__name__} adds auxiliary losses of the routers of two stacks to its loss "
            "(output_router_logits), of which only one can be passed on; set output_router_logits to false"
        )
    tables = [getattr(module, "_can_record_outputs", None) or {} for module in (model.base_model, *model.modules())]
    recorders = next((table["router_logits"] for table in tables if table.get("router_logits")), None)
    if recorders is None:
        raise OctoPipeError(
            f"{type(model).__name__} trains with its routers' auxiliary loss (output_router_logits) and does not say "
            "where its routers are; set output_router_logits to false"
        )
    return Routers(recorders if isinstance(recorders, list) else [recorders])


def router_weight(model: nn.Module) -> float:
    """The factor with which the model's own forward adds its routers' loss; families call it differently."""
    if not getattr(text_config(model), "output_router_logits", False) or not _adds_a_loss(model):
        return 0.0
    found = _WEIGHTED.search(_forward_of(model))
    if found is None:
        raise OctoPipeError(
            f"{type(model).__name__} adds its routers' auxiliary loss (output_router_logits) in a way of its own; set "
            "output_router_logits to false, or give Pipeline a loss of your own"
        )
    return float(attrgetter(found[1])(model))


def _adds_a_loss(model: nn.Module) -> bool:
    """Whether the model's forward knows of a loss of its routers at all: many ignore `output_router_logits`."""
    return "aux_loss" in _NONE.sub("", _forward_of(model))


def _forward_of(model: nn.Module) -> str:
    """The source of the model's forward, and of those of its base classes that it calls."""
    text = ""
    for cls in type(model).__mro__:
        if "forward" not in vars(cls):
            continue
        try:
            own = inspect.getsource(inspect.unwrap(vars(cls)["forward"]))
        except (OSError, TypeError):  # not from a file: nobody knows what it adds
            own = "aux_loss"
        text += own
        if "super()" not in own:
            break
    return text


_NONE = re.compile(r"\baux_loss\s*=\s*None\b")
_WEIGHTED = re.compile(r"\bself\.([\w.]+) \* aux_loss\b")


class Routers:
    """Collects the logits of layers' routers, and passes them to the model's own code in the head."""

    def __init__(self, recorders: list[Any]):
        self._kinds = [
            (getattr(r, "target_class", r), getattr(r, "index", 0), getattr(r, "layer_name", None)) for r in recorders
        ]

    @contextmanager
    def recording(self, layer: nn.Module) -> Iterator[list[Tensor]]:
        """A context that collects the router logits of a layer while it runs."""
        heard: list[Tensor] = []
        hooks = []
        for name, module in layer.named_modules():
            for kind, index, part in self._kinds:
                if isinstance(module, kind) and (part is None or part in name):

                    def hook(_: Any, __: Any, out: Any, index: int = index) -> None:
                        heard.append(out[index] if isinstance(out, tuple) else out)

                    hooks.append(module.register_forward_hook(hook))
        try:
            yield heard
        finally:
            for hook_ in hooks:
                hook_.remove()

    @contextmanager
    def returning(self, model: nn.Module, said: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the model's body returns these logits as those of its routers."""
        order = sorted(said, key=lambda name: tuple(map(int, name.split("_")[1:])))
        logits = tuple(said[name] for name in order)

        def hook(_: Any, __: Any, out: Any) -> Any:
            out.router_logits = logits
            return out

        body: Any = model.base_model
        handle = body.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()
