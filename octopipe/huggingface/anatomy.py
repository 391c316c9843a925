"""Finds where a causal language model of transformers can be split, by tracing its own forward with placeholder layers.

Knows: which module list contains the layers, the arguments of every layer, which parameters are used before the first
and after the last layer, and which inputs a layer takes besides the hidden state. Does not know: how the pieces run
(`pieces.py`), where weights come from (`weights.py`), or model families by name.

The trace needs almost no memory: parameters are single zeros expanded to whole matrices, layers are placeholders, and
everything after the last layer runs on the `meta` device. A model that the trace cannot prove to be split correctly is
rejected.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.provenance import LIKE_SECOND, SHAPE_ALONE, Provenance, on_meta
from octopipe.huggingface.shell import (
    Beside,
    LayerAnswers,
    Refused,
    as_layer_returns,
    collect,
    hidden_leaf,
    is_container,
    leaves_of,
    outside,
    shell_of_zeros,
    text_config,
)
from octopipe.runtime.torch_private import WithoutFunctionModes, pytree

BATCH, TOKENS = 3, 7
"""The sizes of the batch for tracing, chosen so that they differ from usual widths of models."""
IDS = ("input", "input_ids")
"""Marks the tokens among the names of what a tensor was computed from."""
LAYER = "layer"
"""Marks, among the names of what a tensor was computed from, the output of a layer."""
PLAIN = (bool, int, float, str, torch.dtype, torch.device, enum.Enum, type(None))
"""Types of constant arguments, which layers may receive without a transfer between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """The result of a trace: how a model is split, and what its pieces need."""

    path: str
    """The name of the list of layers in the model, such as `model.layers`."""
    num_layers: int
    """The number of layers, without embedding and head."""
    returns: int
    """The length of the tuple that layers return; 0: they return the hidden state itself."""
    batch_dim: int
    """The batch dimension of the hidden state. The dimension of tokens follows it."""
    embed_names: frozenset[str]
    """Parameters and buffers that are used before or between layers, and unused ones."""
    head_names: frozenset[str]
    """Parameters and buffers that are used after the last layer. A tied one is in both sets."""
    carried: tuple[tuple[int, int], ...]
    """Tensors computed before the layers that layers take in addition to the hidden state: for each, the first layer
    that takes it and the index among that layer's arguments."""
    takes: tuple[Mapping[int, int], ...]
    """For every layer, its arguments that are carried tensors: index of the argument -> index in `carried`."""
    needs_ids: bool
    """Whether layers' arguments, or what follows the last layer, depend on the tokens themselves."""

    def last_use(self, number: int) -> int:
        """The last layer that takes this carried tensor."""
        return max(k for k, taken in enumerate(self.takes) if number in taken.values())


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The outermost list with as many entries as the config has layers."""
    text = text_config(model)
    keys = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers")
    wanted = [n for n in (getattr(text, key, None) for key in keys) if n]
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            lists.append((name, module))
    fitting = [item for item in lists if len(item[1]) in wanted]
    # Other lists of this length (norms per layer, for example) have far fewer parameters.
    fitting.sort(key=lambda item: -sum(p.numel() for p in item[1].parameters()))
    if not fitting:
        raise OctoPipeError(
            f"{type(model).__name__} cannot be cut into layers: it has no list of "
            f"{' or '.join(map(str, dict.fromkeys(wanted))) or 'its'} layers; give Pipeline modules of your own"
        )
    return fitting[0]


class _Watch(TorchFunctionMode):
    """Records which parameters are used before the first and after the last layer, and runs what follows the last layer
    on the meta device.

    `provenance` knows what was computed from parameters and from earlier layers. After the last layer, only that
    layer's output (`last`) may be used, because the head of a pipeline receives nothing else.
    """

    def __init__(self, names: dict[int, str], provenance: Provenance):
        super().__init__()
        self.names = names
        self.provenance = provenance
        self.last: Tensor | None = None
        self.head_reads_ids = False
        self.used: dict[str, set[str]] = {"embed": set(), "head": set()}
        self.phase = "embed"

    def note(self, tensor: Any) -> None:
        name = self.names.get(id(tensor))
        if name is not None:
            self.used[self.phase].add(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        if self.phase != "head":
            return func(*args, **kwargs)
        out = func(*pytree.tree_map(on_meta, args), **pytree.tree_map(on_meta, kwargs))
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            self._refuse_early_values(getattr(func, "__name__", ""), args, kwargs)
        return out

    def _refuse_early_values(self, called: str, args: Any, kwargs: Any) -> None:
        if called in SHAPE_ALONE:
            return
        used = args[:1] if called in LIKE_SECOND or called == "to" else (args, kwargs)
        for leaf in pytree.tree_leaves(used):
            known = not isinstance(leaf, Tensor) or leaf is self.last or id(leaf) in self.names
            names = frozenset() if known else self.provenance.of(leaf)
            self.head_reads_ids |= IDS in names
            if names - {IDS}:
                raise Refused("its head takes more than the last layer's output: something computed before it")


def refuse_random_depth(model: nn.Module) -> None:
    """Reject a model that skips layers at random: a plan runs every layer."""
    dropped = max((float(getattr(m, "layerdrop", 0.0) or 0.0) for m in model.modules()), default=0.0)
    if dropped > 0:
        raise OctoPipeError(
            f"{type(model).__name__} skips whole layers at random (layerdrop {dropped:g}), which a pipeline "
            "cannot do; set it to 0 in the config"
        )


def refuse_repeated_layers(model: nn.Module) -> None:
    """Reject a model in whose outermost lists one module with weights stands at several places. Modules are found by
    their names, of which it would have one, so that its other places would be left out."""
    lists: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in lists):
            continue
        lists.append(name)
        first: dict[int, int] = {}
        for place, layer in enumerate(module):
            if first.setdefault(id(layer), place) != place and any(True for _ in layer.parameters()):
                raise OctoPipeError(
                    f"{type(model).__name__} has one module at {name}[{first[id(layer)]}] and {name}[{place}]; put a "
                    "copy with the same Parameters there (copy.deepcopy, them in its memo): shared weights stay tied"
                )


def trace(model: nn.Module) -> Anatomy:
    """The anatomy of a model (on `meta` or real); raises a one-line error if the model cannot be split."""
    path, layers = find_layers(model)
    reason = problem = ""
    for returns in range(4):
        try:
            return _Trace(model, path, len(layers), returns).run()
        except OctoPipeError:
            raise
        except Exception as error:  # a family's code may raise anything for values that it does not expect
            text = " ".join(str(error).split())[:160]
            if isinstance(error, Refused):
                reason = reason or text
            problem = problem or f"its forward fails around placeholders for them ({type(error).__name__}: {text})"
    # A reason of ours is more helpful than an error of the family's code after a wrong guess of `returns`.
    raise OctoPipeError(f"{type(model).__name__} cannot be cut into layers: {reason or problem}")


class _Trace:
    """One attempt to trace the forward, with one assumption about what the layers return."""

    def __init__(self, model: nn.Module, path: str, count: int, returns: int):
        self.model, self.path, self.count, self.returns = model, path, count, returns
        self.outputs: list[Tensor] = []
        self.carried: list[tuple[int, int]] = []
        self.kept: list[Tensor] = []
        self.takes: list[dict[int, int]] = []
        self.batch_dim = 0
        self.containers: dict[int, int] = {}
        self.provenance = Provenance()
        """Autograd does not show what a forward computes from parameters without gradients."""

    def run(self) -> Anatomy:
        shell, answers = shell_of_zeros(self.model, self.path, gradients=True)
        shell.eval()
        names = {id(value): name for name, value in self._named(shell)}
        watch = _Watch(names, self.provenance)
        for name, module in shell.named_modules():
            if not name.startswith(f"{self.path}."):
                own = [*vars(module).get("_parameters", {}).values(), *vars(module).values()]
                module.register_forward_pre_hook(_noting(watch, [t for t in own if isinstance(t, Tensor)]))
        answers.visit = lambda k, args, kwargs: self._visit(k, args, kwargs, watch)
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
        # Placeholders have no routers; `routers.py` handles router logits.
        asked = {"output_router_logits": False} if hasattr(text_config(self.model), "output_router_logits") else {}
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        for name, value in self._named(shell):
            if name in parameters:
                self.provenance.name(value, name)
        self.provenance.name(ids, IDS)
        with self.provenance, watch:
            out = shell(input_ids=ids, use_cache=False, **asked)
        if len(self.takes) != self.count:
            raise Refused(f"its forward runs {len(self.takes)} of {self.count} layers on a batch of tokens")
        if getattr(out, "logits", None) is None:
            raise Refused("its forward gives no logits")
        used = watch.used
        everything = {name for name, _ in outside(self.model, self.path)}
        return Anatomy(
            path=self.path,
            num_layers=self.count,
            returns=self.returns,
            batch_dim=self.batch_dim,
            # Unused parameters go to the embedding, so that all pieces together hold the whole model.
            embed_names=frozenset(used["embed"] | (everything - used["embed"] - used["head"])),
            head_names=frozenset(used["head"]),
            carried=tuple(self.carried),
            takes=tuple(self.takes),
            needs_ids=watch.head_reads_ids or self._needs_ids(shell, answers),
        )

    def _named(self, shell: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, _ in outside(self.model, self.path):
            owner, _, attribute = name.rpartition(".")
            yield name, getattr(shell.get_submodule(owner), attribute)

    def _visit(self, k: int, args: tuple[Any, ...], kwargs: dict[str, Any], watch: _Watch) -> Any:
        if k != len(self.takes):
            raise Refused(f"its forward runs layer {k} out of order or more than once")
        with WithoutFunctionModes():
            leaves, _ = leaves_of(args, kwargs)
            at = hidden_leaf(leaves)
            hidden = leaves[at]
            if k == 0:
                self.batch_dim = _batch_dim(hidden)
            elif hidden is not self.outputs[-1]:
                raise Refused(f"its forward changes the hidden state between layers {k - 1} and {k}")
            self.takes.append(
                {i: self._carry(k, i, leaf) for i, leaf in enumerate(leaves) if i != at and self._moves(k, i, leaf)}
            )
            out = torch.zeros_like(hidden, requires_grad=True)
            self.outputs.append(out)
            self.provenance.name(out, (LAYER, k))
        if k == self.count - 1:
            watch.phase, watch.last = "head", out
        return as_layer_returns(out, self.returns, Beside())

    def _moves(self, k: int, i: int, leaf: Any) -> bool:
        """Whether an argument must travel with the hidden state; raises for arguments that cannot."""
        if isinstance(leaf, Tensor):
            if not leaf.requires_grad:
                if any(name[0] == LAYER for name in self.provenance.of(leaf) if isinstance(name, tuple)):
                    raise Refused(
                        f"layer {k} takes something made of an earlier layer's output beside the hidden state"
                    )
                return bool(self.provenance.of(leaf))
            made_of: tuple[Tensor | None, ...] = ()
            if self.outputs:
                made_of = torch.autograd.grad(leaf.sum(), self.outputs, allow_unused=True, retain_graph=True)
            if any(g is not None for g in made_of):
                raise Refused(f"layer {k} takes something made of an earlier layer's output beside the hidden state")
            return True
        if isinstance(leaf, Beside):
            raise Refused(f"layer {k} takes what an earlier layer returns beside the hidden state")
        if is_container(leaf):
            if not isinstance(leaf, dict | list):
                raise Refused(f"its layers share a {type(leaf).__name__} that one may fill and another read")
            if self.containers.setdefault(id(leaf), k) != k:
                raise Refused("its layers share a container that one fills and another reads")
            return False
        if not isinstance(leaf, PLAIN) and not callable(leaf) and type(leaf).__module__.split(".")[0] != "transformers":
            raise Refused(f"its layers take a {type(leaf).__name__}")
        if type(leaf).__name__.endswith("Cache"):
            raise Refused(f"its layers share a {type(leaf).__name__} in training")
        return False

    def _carry(self, k: int, i: int, leaf: Tensor) -> int:
        for number, kept in enumerate(self.kept):
            if kept is leaf:
                return number
        self.kept.append(leaf)
        self.carried.append((k, i))
        return len(self.kept) - 1

    def _needs_ids(self, shell: nn.Module, answers: LayerAnswers) -> bool:
        """Whether the layers' arguments depend on the tokens' values other than through the embeddings, which are zeros
        here."""
        seen = []
        vocab = int(getattr(text_config(self.model), "vocab_size", 2))
        for ids in (torch.zeros(BATCH, TOKENS, dtype=torch.long), torch.arange(BATCH * TOKENS).view(BATCH, -1) % vocab):
            got = collect(shell, answers, self.count, self.returns, {"input_ids": ids})
            seen.append([leaf.detach() for leaves, _, _ in got for leaf in leaves if isinstance(leaf, Tensor)])
        same = len(seen[0]) == len(seen[1])
        return not (same and all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*seen)))


def _noting(watch: _Watch, tensors: list[Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        for tensor in tensors:
            watch.note(tensor)

    return hook


def _batch_dim(hidden: Tensor) -> int:
    for d in range(hidden.ndim - 1):
        if hidden.shape[d] == BATCH and hidden.shape[d + 1] == TOKENS:
            return d
    raise Refused(f"its hidden state of shape {tuple(hidden.shape)} has no batch of sequences")
