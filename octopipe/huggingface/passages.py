"""The pieces of a model with several stacks of layers: passages between layers, and one piece per visit of a layer.

Knows: how a passage runs the model's own forward around its layers, and what travels from piece to piece. Does not
know: where a model can be split (`sections.py`), where weights come from (`weights.py`), pipelines.

A batch is a dict of the model's inputs. Between pieces, a dict travels:

- `hidden`: the hidden state of the current layer;
- `inputs`: the inputs that later passages run on; of those whose values nobody needs any more, shape and dtype alone;
- `calls`, `call_of`, `tensors`: how the layers behind the last passage are called, and with which tensors;
- `outs`, `extra_results`, `kept`, `shared`: hidden states of earlier layers, results beside them, arguments that
  earlier passages made, and containers that layers share, as long as something later takes them;
- `routers`: what routers have said, where the model trains with their auxiliary loss.

All of it is tensors and constants, and whatever requires a gradient gets one. A micro-batch whose forward does not
visit the layers of a stack (text without images) passes them untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.routers import Routers
from octopipe.huggingface.sections import SENT, ExtraResult, Sections, quiet, returned
from octopipe.huggingface.shell import LayerAnswers, Stop, Unpacked, hidden_leaf, leaves_of, placeholders_on
from octopipe.runtime.torch_private import pytree

Travel = dict[str, Any]


class Passage(nn.Module):
    """The model's own code between two layers."""

    def __init__(
        self,
        shell: nn.Module,
        answers: LayerAnswers,
        sections: Sections,
        number: int,
        missing: list[tuple[str, Tensor]],
        routers: Routers | None = None,
    ):
        """`missing`: parameters of other passages, of which this passage needs only the shapes."""
        super().__init__()
        self.model = shell
        self._routers = routers
        self._answers, self._sections, self._number, self._missing = answers, sections, number, missing
        self._start, self._stop = sections.starts[number], sections.stop(number)
        self._quiet = quiet(shell)
        self._on: torch.device | None = None

    def forward(self, value: Any) -> Any:
        travel = self._arrived(value)
        given = {name: _filled(item) for name, item in travel["inputs"].items()}
        device = next((t.device for t in (travel.get("hidden"), *given.values()) if isinstance(t, Tensor)), None)
        if device is not None and self._on != device:
            self._placeholders_on(device)
        run = _Run(self._sections, self._number, travel)
        is_last = self._number == len(self._sections.starts) - 1
        try:
            with self._answers.given_by(run.visit), Unpacked(given):
                if self._routers is not None and is_last:
                    # Without an argument the forward decides: some read only one of their configs, some none.
                    asked = {k: v for k, v in self._quiet.items() if k != "output_router_logits"}
                    with self._routers.returning(self.model, travel.get("routers", {})):
                        out = self.model(**given, **asked)
                    return out.logits, out.aux_loss
                out = self.model(**given, **self._quiet)
        except Stop:
            return run.departing()
        if is_last:
            return out.logits
        raise OctoPipeError(
            f"{type(self.model).__name__}: this batch ends before layer {self._sections.layers[0]}; "
            "give inputs like those of the example"
        )

    def _arrived(self, value: Any) -> Travel:
        if self._number:
            return dict(value)
        if isinstance(value, Tensor):
            value = {"input_ids": value}
        if not isinstance(value, Mapping):
            raise OctoPipeError("the batch is neither a tensor of tokens nor a dict of the model's inputs; give one")
        given = {name: item for name, item in value.items() if item is not None}
        alien = sorted(set(given) - set(self._sections.inputs) - {"attention_mask", "position_ids"})
        if alien:
            remedy = "give labels as the target" if "labels" in alien else f"use {', '.join(self._sections.inputs)}"
            raise OctoPipeError(f"the batch has {', '.join(alien)}, which the model's example does not have; {remedy}")
        return {"inputs": given}

    def _placeholders_on(self, device: torch.device) -> None:
        placeholders_on(self.model, self._missing, device)
        self._on = device


class _Run:
    """One run of the model's forward in a passage: it provides the layers' results and records the layers'
    arguments."""

    def __init__(self, sections: Sections, number: int, travel: Travel):
        self._sections, self._number, self._travel = sections, number, travel
        self._start, self._stop = sections.starts[number], sections.stop(number)
        self._at = -1
        self._hidden: Tensor | None = None
        self._before: Tensor | None = None
        """The hidden state that the previous visit returned."""
        self._tensors: dict[int, tuple[int, Tensor]] = {}
        self._calls: list[Any] = []
        self._call_of: list[int] = []
        self._kept = dict(travel.get("kept", {}))

    def visit(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sections = self._sections
        g = self._at = self._next(layer)
        if g >= self._stop and self._stop > self._start:
            raise Stop
        leaves, structure = leaves_of(args, kwargs)
        at = hidden_leaf(leaves)
        if g < self._start:
            out = self._known(g, leaves[at])
        else:
            self._record(g, leaves, structure, at)
            if g == self._stop - 1:
                raise Stop
            out = leaves[at].detach().new_zeros(()).expand(leaves[at].shape)
        self._before = out
        return returned(out, sections.returns[layer], g)

    def _next(self, layer: int) -> int:
        """The number of this visit: the first visit of this layer after the latest visit. Visits of stacks that the
        batch does not run are skipped."""
        for g in range(self._at + 1, len(self._sections.visits)):
            if self._sections.visits[g] == layer:
                return g
        raise OctoPipeError(
            f"this batch runs {self._sections.layers[layer]} and the example did not; give an example like the batches"
        )

    def _known(self, g: int, hidden: Tensor) -> Tensor:
        if g not in self._sections.outputs[self._number]:
            found = hidden.detach()
        else:
            found = self._travel["hidden"] if g == self._start - 1 else self._travel["outs"][str(g)]
        return found.clone() if g in self._sections.changed else found

    def _record(self, g: int, leaves: list[Any], structure: Any, at: int) -> None:
        chained = leaves[at] is self._before and g > self._start
        if g == self._start:
            self._hidden = leaves[at]
        elif not chained:
            raise OctoPipeError(
                f"this batch changes the hidden state before {self._sections.layers[self._sections.visits[g]]}, "
                "which the example did not; give an example like the batches"
            )
        signs = [("#hidden",) if i == at else self._sign(g, i, leaf) for i, leaf in enumerate(leaves)]
        call = pytree.tree_unflatten(signs, structure)
        known = next((k for k, other in enumerate(self._calls) if _same(other, call)), None)
        if known is None:
            known = len(self._calls)
            self._calls.append(call)
        self._call_of.append(known)

    def _sign(self, g: int, i: int, leaf: Any) -> Any:
        """The placeholder for an argument while it is sent from piece to piece."""
        sections = self._sections
        if isinstance(leaf, ExtraResult):
            return ("#aside", g - leaf.visit, leaf.place)
        if (g, i) in sections.kept:
            return ("#kept", _key(sections.kept[g, i]))
        if (g, i) in sections.shared:
            return ("#shared", str(sections.shared[g, i]), i)
        if isinstance(leaf, Tensor):
            if (g, i) in sections.kept.values():
                self._kept[_key((g, i))] = leaf
            number, _ = self._tensors.setdefault(id(leaf), (len(self._tensors), leaf))
            return ("#tensor", number)
        return leaf if isinstance(leaf, (SENT, dict | list)) else ("#own", i)

    def departing(self) -> Travel:
        """Everything that is sent to the next piece."""
        sections, number = self._sections, self._number
        inputs = self._travel["inputs"]
        later = frozenset[str]().union(*sections.values[number + 1 :])
        out: Travel = {"inputs": {name: _thinned(item, name in later) for name, item in inputs.items()}}
        outs = {k: t for k, t in self._travel.get("outs", {}).items() if sections.last_use(int(k)) > number}
        before = self._travel.get("hidden")
        if before is not None and sections.last_use(self._start - 1) > number:
            outs[str(self._start - 1)] = before
        kept = {
            k: t
            for k, t in self._kept.items()
            if any(_key(w) == k and g[0] >= self._start for g, w in sections.kept.items())
        }
        for name, part in (("outs", outs), ("kept", kept), ("extra_results", self._travel.get("extra_results"))):
            if part:
                out[name] = part
        out |= {name: self._travel[name] for name in ("shared", "routers") if self._travel.get(name)}
        if self._hidden is None:  # the forward went past this stack
            return out
        tensors = [tensor for _, tensor in self._tensors.values()]
        return {"hidden": self._hidden, "calls": self._calls, "call_of": self._call_of, "tensors": tensors, **out}


class Visit(nn.Module):
    """One of the model's layers, called with the arguments that the model gives it."""

    def __init__(self, layer: nn.Module, sections: Sections, number: int, routers: Routers | None = None):
        super().__init__()
        self.layer = layer
        self._routers = routers
        self._sections, self._number = sections, number
        passage = sections.passage_of(number)
        self._first = sections.starts[passage]
        self._is_last = number == sections.stop(passage) - 1
        self._shared_after = sections.shared_after(number)
        self._is_idle = sections.is_idle(number)
        """Whether the model does not use this layer's result (in a tower of which an earlier output is taken)."""

    def forward(self, value: Travel) -> Travel:
        if "calls" not in value:  # this micro-batch does not visit the layer
            return value
        sections, g = self._sections, self._number
        travel, shared = dict(value), {}
        if self._is_idle:
            return self._done(travel)

        def meant(sign: Any) -> Any:
            kind = sign[0]
            if kind == "#hidden":
                return travel["hidden"]
            if kind == "#tensor":
                return travel["tensors"][sign[1]]
            if kind == "#aside":
                return travel["extra_results"][_key((g - sign[1], sign[2]))]
            if kind == "#kept":
                return travel["kept"][sign[1]]
            if kind == "#own":
                return sections.own[g, sign[1]]
            shared[sign[1]] = made = copy.copy(sections.own[g, sign[2]])
            contents = travel.get("shared", {}).get(sign[1], ())
            made.update(contents) if isinstance(made, MutableMapping) else made.extend(contents)
            return made

        args, kwargs = _replaced(travel["calls"][travel["call_of"][g - self._first]], meant)
        if self._routers is None:
            out = self.layer(*args, **kwargs)
        else:
            with self._routers.recording(self.layer) as heard:
                out = self.layer(*args, **kwargs)
            said = {f"router_{g}_{i}": logits for i, logits in enumerate(heard)}
            travel["routers"] = {**travel.get("routers", {}), **said}
        results = out if isinstance(out, tuple | list) else (out,)
        if sections.returns[sections.visits[g]] < 0 and any(item is not None for item in results[1:]):
            raise OctoPipeError(
                f"{sections.layers[sections.visits[g]]} returns something beside its hidden state, which it did not on "
                "the example; give an example like the batches"
            )
        travel["hidden"] = results[0]
        extra_results = {
            k: t for k, t in travel.pop("extra_results", {}).items() if sections.last_extra_result[_places(k)] > g
        }
        extra_results |= {_key((g, place)): results[place] for place in sections.extra_results.get(g, ())}
        if extra_results:
            travel["extra_results"] = extra_results
        if shared:
            plain = {number: (dict if isinstance(made, Mapping) else list)(made) for number, made in shared.items()}
            plain = {**travel.pop("shared", {}), **plain}
            if plain := {number: contents for number, contents in plain.items() if number in self._shared_after}:
                travel["shared"] = plain
        if sections.last_use(g) > sections.passage_of(g) + 1 or (
            sections.last_use(g) > sections.passage_of(g) and not self._is_last
        ):
            travel["outs"] = {**travel.get("outs", {}), str(g): results[0]}
        return self._done(travel)

    def _done(self, travel: Travel) -> Travel:
        if self._is_last:
            for name in ("calls", "call_of", "tensors"):
                del travel[name]
        return travel


def _key(place: tuple[int, int]) -> str:
    return f"{place[0]}.{place[1]}"


def _places(key: str) -> tuple[int, int]:
    first, second = key.split(".")
    return int(first), int(second)


def _replaced(call: Any, meant: Any) -> Any:
    """A call whose placeholders are replaced by the values that they stand for."""
    if isinstance(call, tuple) and call and isinstance(call[0], str) and call[0].startswith("#"):
        return meant(call)
    if isinstance(call, dict):
        return {key: _replaced(item, meant) for key, item in call.items()}
    if isinstance(call, tuple | list):
        return type(call)(_replaced(item, meant) for item in call)
    return call


def _same(a: Any, b: Any) -> bool:
    """Whether two calls are equal and of equal types: 1, 1.0 and True are different arguments."""
    return repr(a) == repr(b)


def _thinned(item: Any, wanted: bool) -> Any:
    """An input as later passages need it: with its values, or only its shape and dtype."""
    if wanted or not isinstance(item, Tensor) or not item.is_floating_point():
        return item
    return ("#like", tuple(item.shape), item.dtype, item.new_zeros(0))


def _filled(item: Any) -> Any:
    if isinstance(item, tuple) and item and item[0] == "#like":
        return item[3].new_zeros(()).expand(item[1])
    return item


__all__ = ["Passage", "Visit"]
