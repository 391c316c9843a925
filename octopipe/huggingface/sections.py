"""Where a model with several stacks of layers can be split: towers, encoder-decoders, and layers that share tensors.

Knows: in which order a forward visits the layers of all stacks, at which visits something new is computed between
layers, and what that needs: parameters, outputs of earlier layers, inputs of the model. Does not know: how the pieces
run (`passages.py`), where weights come from, or model families by name.

The code between two layers is a *passage*. There is one before the first layer, one after the last, and one wherever a
layer does not simply take what the previous layer returned: between a tower and the language model, between an encoder
and the decoder. What a passage needs is found by running the model's forward once on an example with placeholder layers
and following which tensors every argument of every layer was computed from (`provenance.py`).
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.provenance import Provenance
from octopipe.huggingface.shell import (
    Refused,
    Unpacked,
    hidden_leaf,
    is_container,
    leaves_of,
    outside,
    shell_of_zeros,
    text_config,
)
from octopipe.runtime.torch_private import WithoutFunctionModes

COUNTS = re.compile(r"(^|_)(layers?|depth|blocks)$")
"""Config keys whose values are numbers of layers."""
MOST_VISITS = 4096
"""A forward that visits more layers than this is not a pipeline."""


UNFOLLOWED = "its forward cannot be followed around layers that take and return one hidden state"
MOST_STACKS = 6
"""The number of lists that are tried as stacks: the largest ones."""
WITH_NONE = -2
"""A guess of what layers return: a tuple of the hidden state and None (XLNet without its second stream)."""
MOST_GUESSES = 24
"""The number of guesses (one form of returned values per list) that are tried first."""
RETURNS = (0, 1, 2, 3, 4, 5)
"""Guesses of what layers return: 0 is the hidden state itself, n a tuple of n values."""


_NONE_RUN = (
    "its forward does not run them, as one that was assigned to the model and calls that of another copy; "
    "override it in a class"
)


class _NotVisited(Refused):
    """The forward does not run the layers of these lists on the example."""

    def __init__(self, paths: list[str]):
        super().__init__(f"its forward does not run {', '.join(paths)} on the example")
        self.paths = paths


@dataclass(frozen=True, slots=True)
class ExtraResult:
    """A placeholder for a result that a layer returns beside its hidden state: the visit, and its position among the
    results."""

    visit: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sections:
    """The result of a trace. Visits and passages are numbered in the order in which the forward runs them."""

    paths: tuple[str, ...]
    """The lists of layers."""
    layers: tuple[str, ...]
    """Every layer's name in the model, one list after the other."""
    returns: tuple[int, ...]
    """What every layer returns. n: a tuple of n values; 0: the hidden state itself; -n: a tuple of n values, all None
    except the hidden state."""
    visits: tuple[int, ...]
    """The layer of every visit; a layer that is used several times is visited several times."""
    starts: tuple[int, ...]
    """For every passage, the first visit after it. The last passage follows all visits."""
    parameters: tuple[frozenset[str], ...]
    """For every passage, the parameters that it uses."""
    outputs: tuple[frozenset[int], ...]
    """For every passage, the visits whose hidden states it uses."""
    values: tuple[frozenset[str], ...]
    """For every passage, the inputs of the model whose values it uses."""
    kept: Mapping[tuple[int, int], tuple[int, int]]
    """Arguments (visit, leaf) that an earlier passage computed -> visit and leaf at which they occurred first."""
    extra_results: Mapping[int, frozenset[int]]
    """For visits, the positions of results besides the hidden state that later layers take."""
    last_extra_result: Mapping[tuple[int, int], int]
    """For every such result (visit, position), the last visit that takes it."""
    own: Mapping[tuple[int, int], Any]
    """Arguments (visit, leaf) that are objects of the model, such as configs or functions: equal for all batches. Of a
    container, an empty one, of which every micro-batch gets a copy."""
    shared: Mapping[tuple[int, int], int]
    """Arguments (visit, leaf) that are a container, which several layers may share -> the number of the container."""
    changed: frozenset[int]
    """Visits whose hidden states the forward changes in place."""
    inputs: tuple[str, ...]
    """The names of the example's inputs."""

    def passage_of(self, visit: int) -> int:
        """The passage that computes the arguments of a visit."""
        return max(p for p, start in enumerate(self.starts) if start <= visit)

    def stop(self, passage: int) -> int:
        """The first visit whose arguments the passage does not compute."""
        return self.starts[passage + 1] if passage + 1 < len(self.starts) else self.starts[passage]

    def is_idle(self, visit: int) -> bool:
        """Whether nothing uses the results of this visit and of those that follow it up to the next passage."""
        rest = range(visit, self.stop(self.passage_of(visit)))
        return all(self.last_use(g) < 0 and not self.extra_results.get(g) for g in rest)

    def shared_after(self, visit: int) -> frozenset[str]:
        """The containers that visits after this one take."""
        return frozenset(str(number) for (g, _), number in self.shared.items() if g > visit)

    def last_use(self, visit: int) -> int:
        """The last passage that uses this visit's hidden state, or -1."""
        return max((p for p, used in enumerate(self.outputs) if visit in used), default=-1)


def stacks(model: nn.Module) -> list[str]:
    """The lists that may be stacks of layers, the largest first: those whose length is a number of layers in the
    config, or all."""
    wanted = set(_counts(model.config.to_dict()))  # type: ignore[union-attr, operator]
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if type(module) is nn.ModuleList and len(module) and not inside:
            found.append((name, module))
    found = [item for item in found if all(map(_can_run, item[1]))]
    counted = [item for item in found if len(item[1]) in wanted]
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in counted or found}
    return sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:MOST_STACKS]


def _can_run(module: nn.Module) -> bool:
    """Whether a module has a forward of its own, which a list of parts lacks, and is not one of torch's own operations.
    A list of such operations is part of a module (the linear layers of a projector, for example), not a stack."""
    operation = type(module).__module__.startswith("torch.nn.") and not any(True for _ in module.children())
    return type(module).forward is not nn.Module.forward and not operation


def _counts(data: Any) -> Iterator[int]:
    for key, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, dict):
            yield from _counts(value)
        elif isinstance(value, int) and COUNTS.search(str(key)):
            yield value


def trace_sections(model: nn.Module, example: Mapping[str, Any]) -> Sections:
    """The sections of a model (on `meta` or real); raises a one-line error if the model cannot be split."""
    found = stacks(model)
    if not found:
        raise OctoPipeError(
            f"{type(model).__name__} cannot be cut into layers: it has no list of its config's layers; give Pipeline "
            "modules of your own"
        )
    reason, furthest = "", -1
    # First all stacks are tried as layers of the pipeline. If that fails, smaller ones are left to the passages.
    tried = [found[:count] for count in range(len(found), 0, -1)]
    for chosen in tried:
        paths = [name for name, _ in model.named_modules() if name in chosen]
        guesses = _guesses(model, paths)
        ends: dict[int, str] = {}
        for guess in guesses:
            attempt = _Trace(model, paths, guess, example)
            try:
                return attempt.run()
            except _NotVisited as error:
                used = [path for path in chosen if path not in error.paths]
                if used and used not in tried:
                    tried.insert(tried.index(chosen) + 1, used)
                break
            except OctoPipeError:
                raise
            except Exception as error:  # a family's code may raise anything for values that it does not expect
                # A wrong guess fails early, so the error of the attempt that came furthest is the most helpful.
                refused = isinstance(error, Refused)
                if (far := len(attempt.visits) + MOST_VISITS * refused) > furthest:
                    text = " ".join(str(error).split())[:160]
                    reason, furthest = text if refused else f"{UNFOLLOWED} ({type(error).__name__}: {text})", far
                _add_next_guess(guesses, guess, attempt, paths)
                if attempt.visits:
                    ends[len(attempt.visits)] = attempt.layers[attempt.visits[-1]].rpartition(".")[0]
        else:  # layers that change the shape of the hidden state are no layers of the pipeline
            without = [path for path in chosen if ends and path != ends[max(ends)]]
            if without and without not in tried:
                tried.insert(tried.index(chosen) + 1, without)
    raise OctoPipeError(f"{type(model).__name__} cannot be cut into layers: {reason or _NONE_RUN}")


def _add_next_guess(
    guesses: list[tuple[int, ...]], guess: tuple[int, ...], attempt: _Trace, paths: Sequence[str]
) -> None:
    """For models with too many lists to try all combinations: change what the last list that was reached is assumed to
    return."""
    if not attempt.visits or len(guesses) > 2 * MOST_GUESSES:
        return
    at = list(paths).index(attempt.layers[attempt.visits[-1]].rpartition(".")[0])
    for count in RETURNS:
        other = (*guess[:at], count, *guess[at + 1 :])
        if other not in guesses:
            guesses.append(other)


def _guesses(model: nn.Module, paths: Sequence[str]) -> list[tuple[int, ...]]:
    """What the layers of each list may return, the likely forms first: a tensor, a tuple of one to three, or a tuple of
    a tensor and None."""
    said = [said_returns(model, path) for path in paths]
    alike = [(count,) * len(paths) for count in (said[0][0], 0, 1, 2, 3, WITH_NONE)]
    mixed = itertools.product((0, 1, 2, 3), repeat=len(paths))
    by_word = sorted(mixed, key=lambda guess: sum(said[k].index(n) for k, n in enumerate(guess)))
    return list(dict.fromkeys((*alike, *by_word)))[:MOST_GUESSES]


def said_returns(model: nn.Module, path: str) -> tuple[int, ...]:
    """What the layers of a list return according to their annotations, the likely forms first."""
    layer = next(iter(model.get_submodule(path).children()))
    annotated = str(inspect.signature(layer.forward).return_annotation).lower()
    return (1, 2, 3, 0, WITH_NONE) if "tuple" in annotated else (0, 1, 2, 3, WITH_NONE)


class _Trace:
    """One attempt to trace the forward, with one assumption about what the layers return."""

    def __init__(self, model: nn.Module, paths: Sequence[str], returns: Sequence[int], example: Mapping[str, Any]):
        self.model, self.paths, self.example = model, tuple(paths), example
        self.layers: list[str] = []
        self.returns: list[int] = []
        for path, count in zip(paths, returns, strict=True):
            for key, _ in model.get_submodule(path).named_children():
                self.layers.append(f"{path}.{key}")
                self.returns.append(count)
        self.visits: list[int] = []
        self.hidden: list[Tensor] = []
        """The hidden state that every visit returned."""
        self.starts: list[int] = []
        self.parameters: list[set[str]] = []
        self.outputs: list[set[int]] = []
        self.values: list[set[str]] = []
        self.first: dict[int, tuple[int, int]] = {}
        """For every tensor, by its id, the visit and leaf at which it was first an argument."""
        self.alive: list[Any] = []
        self.kept: dict[tuple[int, int], tuple[int, int]] = {}
        self.extra_results: dict[int, set[int]] = {}
        self.last_extra_result: dict[tuple[int, int], int] = {}
        self.own: dict[tuple[int, int], Any] = {}
        self.containers: dict[int, list[tuple[int, int]]] = {}
        self.provenance = Provenance()

    def run(self) -> Sections:
        shell, answers = shell_of_zeros(self.model, self.paths, gradients=True)
        shell.eval()
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            if not name.startswith(tuple(f"{path}." for path in self.paths)):
                owner, _, attribute = name.rpartition(".")
                self.provenance.name(getattr(shell.get_submodule(owner), attribute), ("parameter", name))
        inputs = {name: value for name, value in self.example.items() if value is not None}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                self.provenance.name(value, ("input", name))
        head = shell.get_output_embeddings() if hasattr(shell, "get_output_embeddings") else None  # type: ignore[operator]
        if isinstance(head, nn.Module):  # of the logits, only the shape and the names are needed
            head.register_forward_pre_hook(lambda *_: setattr(self.provenance, "meta", True))
        with answers.given_by(self._visit), Unpacked(inputs), self.provenance:
            out = shell(**inputs, **quiet(self.model))
        logits = getattr(out, "logits", None)
        if not isinstance(logits, Tensor):
            raise Refused("its forward gives no logits")
        if logits.shape[:-1].numel() < _tokens(inputs):  # the forward indexed a tensor as if it were a tuple
            raise ValueError("its forward gives fewer logits than the batch has tokens")
        run = {self.layers[layer].rpartition(".")[0] for layer in self.visits}
        if run != set(self.paths):
            raise _NotVisited(sorted(set(self.paths) - run))
        if len(set(self.visits)) < len(self.layers):
            raise Refused(self._not_run())
        self._begin(len(self.visits))
        self._needs(self.provenance.of(logits))
        return self._found()

    def _not_run(self) -> str:
        """The layers that the example does not reach, usually because they need an input that it does not have."""
        idle = [name for number, name in enumerate(self.layers) if number not in self.visits]
        kind = type(self.model.get_submodule(idle[0])).__name__
        more = f" and {len(idle) - 1} more of {len(self.layers)} layers" if len(idle) > 1 else ""
        return f"its forward does not run {idle[0]} ({kind}){more} on a batch of {' and '.join(self.example)}"

    def _visit(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        g = len(self.visits)
        if g >= MOST_VISITS:
            raise Refused(f"its forward visits layers more than {MOST_VISITS} times")
        with WithoutFunctionModes():
            leaves, _ = leaves_of(args, kwargs)
            at = hidden_leaf(leaves)
            if self.hidden and leaves[at].ndim < self.hidden[-1].ndim and self._is_next(layer):
                raise ValueError("its layers return a tuple")  # the forward indexed a tensor as if it were a tuple
            chained = bool(self.hidden) and leaves[at] is self.hidden[-1] and not leaves[at]._version
            late = any(self._is_late(leaf) for i, leaf in enumerate(leaves) if not (chained and i == at))
            if not chained or late:
                self._begin(g)
            for i, leaf in enumerate(leaves):
                self._argument(g, i, leaf, chained=chained and i == at)
            self.visits.append(layer)
            # Not a leaf of autograd, because forwards may change a layer's result in place.
            out = torch.zeros_like(leaves[at], requires_grad=True).clone()
            self.hidden.append(out)
            self.provenance.name(out, ("visit", g))
        return returned(out, self.returns[layer], g)

    def _is_next(self, layer: int) -> bool:
        """Whether the layer directly follows the one that was visited last."""
        return (
            layer == self.visits[-1] + 1
            and self.layers[layer].rpartition(".")[0] == self.layers[layer - 1].rpartition(".")[0]
        )

    def _is_late(self, leaf: Any) -> bool:
        """Whether an argument was computed from a layer that follows the current passage."""
        if not isinstance(leaf, Tensor) or id(leaf) in self.first or not self.starts:
            return False
        return any(name[0] == "visit" and name[1] >= self.starts[-1] for name in self.provenance.of(leaf))  # type: ignore[index]

    def _begin(self, g: int) -> None:
        self.starts.append(g)
        self.parameters.append(set())
        self.outputs.append(set())
        self.values.append(set())

    def _argument(self, g: int, i: int, leaf: Any, *, chained: bool) -> None:
        if chained:
            return
        if isinstance(leaf, ExtraResult):
            self.extra_results.setdefault(leaf.visit, set()).add(leaf.place)
            self.last_extra_result[leaf.visit, leaf.place] = g
        elif isinstance(leaf, Tensor):
            names = self.provenance.of(leaf)
            live = any(name[0] in ("parameter", "visit") for name in names)  # type: ignore[index]
            if leaf.requires_grad and not live:
                raise Refused(
                    f"an argument of its layers (visit {g}) is computed by a custom autograd function, which cannot "
                    "be followed"
                )
            where = self.first.setdefault(id(leaf), (g, i))
            self.alive.append(leaf)
            if live and where[0] < self.starts[-1]:
                self.kept[g, i] = where
            elif where == (g, i):
                self._needs(names)
        elif is_container(leaf):
            if len(leaf):
                raise Refused(f"its layers take a {type(leaf).__name__} that is not empty")
            self.containers.setdefault(id(leaf), []).append((g, i))
            self.alive.append(leaf)
            self.own[g, i] = copy.copy(leaf)
        elif type(leaf).__name__.endswith("Cache"):
            raise Refused(f"its layers share a {type(leaf).__name__} in training")
        elif not isinstance(leaf, SENT):
            self.own[g, i] = leaf

    def _needs(self, names: frozenset[Any]) -> None:
        needs: dict[str, Any] = {"parameter": self.parameters, "visit": self.outputs, "input": self.values}
        for kind, name in names:
            needs[kind][-1].add(name)

    def _found(self) -> Sections:
        used = set().union(*self.parameters)
        named = [name for name, _ in outside(self.model, self.paths) if name in _parameters(self.model)]
        by_tensor = {id(p): name for name, p in self.model.named_parameters(remove_duplicate=False) if name in used}
        # Unused parameters go to the first passage, so that all pieces together hold the whole model.
        idle = {name for name in named if id(self.model.get_parameter(name)) not in by_tensor}
        parameters = [set(names) for names in self.parameters]
        parameters[0] |= idle
        # Every passage runs the forward from its beginning, so all of them need the inputs that determine control flow.
        sources: Any = self.provenance.read
        read = {name for kind, name in sources if kind == "input"}
        shared: dict[tuple[int, int], int] = {}
        for number, places in enumerate(self.containers.values()):
            if len({g for g, _ in places}) > 1 or not isinstance(self.own[places[0]], dict | list):
                shared |= dict.fromkeys(places, number)
        return Sections(
            paths=self.paths,
            layers=tuple(self.layers),
            returns=tuple(self.returns),
            visits=tuple(self.visits),
            starts=tuple(self.starts),
            parameters=tuple(map(frozenset, parameters)),
            outputs=tuple(map(frozenset, self.outputs)),
            values=tuple(frozenset(names | read) for names in self.values),
            kept=self.kept,
            extra_results={g: frozenset(places) for g, places in self.extra_results.items()},
            last_extra_result=self.last_extra_result,
            own=self.own,
            shared=shared,
            changed=frozenset(g for g, out in enumerate(self.hidden) if out._version),
            inputs=tuple(self.example),
        )


def _tokens(inputs: Mapping[str, Any]) -> int:
    """The number of positions for which a batch needs logits; the codes of several codebooks may share one position."""
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    return ids.shape[:2].numel() if isinstance(ids, Tensor) else 0


SENT = (bool, int, float, str, torch.dtype, type(None), Tensor)
"""Types of arguments that are sent with a micro-batch."""


def returned(hidden: Tensor, returns: int, visit: int) -> Any:
    """A hidden state in the form in which a layer returns it, with placeholders for the other results."""
    if returns < 0:
        return (hidden, *[None] * (-returns - 1))
    return (hidden, *(ExtraResult(visit, place) for place in range(1, returns))) if returns else hidden


def quiet(model: nn.Module) -> dict[str, Any]:
    """Arguments of a forward for training: without a cache and without outputs that nobody uses."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in names.values())
    out = {"use_cache": False} if "use_cache" in names or open_ended else {}
    if getattr(text_config(model), "output_router_logits", False):  # placeholders have no routers
        out["output_router_logits"] = False
    return {**out, "use_mems": False} if "use_mems" in names else out


def _parameters(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}
