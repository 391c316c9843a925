"""The pieces of a split causal language model: embedding, one piece per layer, norm and head.

Knows: how each piece runs the family's own code, and what is passed between pieces: the hidden state alone, or a dict
with it and whatever later layers need (attention mask, positions, tensors derived from embeddings, router logits). Does
not know: where a model can be split (`anatomy.py`), where weights come from (`weights.py`), pipelines.

A batch is a tensor of tokens or a dict with `input_ids` and any of `attention_mask`, `position_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.anatomy import Anatomy
from octopipe.huggingface.shell import (
    LayerAnswers,
    Unpacked,
    as_layer_returns,
    collect,
    fill_buffers,
    leaves_of,
    placeholders_on,
    real_buffer,
    shell_of,
    zeros_like_all_of,
)
from octopipe.runtime.stages.shards import marked, masked_embedding, names_of, with_rows
from octopipe.runtime.torch_private import pytree

SIDE = ("attention_mask", "position_ids")
"""Inputs besides the tokens, on which the arguments of every layer may depend."""
REMEMBERED = 8
"""The number of shapes of batches for which the layers' arguments are kept."""


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """A batch as keyword arguments of the model."""
    if isinstance(batch, Tensor):
        return {"input_ids": batch}
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise OctoPipeError("the batch is neither a tensor of tokens nor a dict with input_ids; give one of them")
    given = {key: value for key, value in batch.items() if value is not None}
    alien = sorted(set(given) - {"input_ids", *SIDE})
    if alien:
        remedy = "give labels as the target" if "labels" in alien else f"use input_ids, {' and '.join(SIDE)}"
        raise OctoPipeError(f"the batch has {', '.join(alien)}, which the pipeline does not take; {remedy}")
    return given


class Recorder:
    """The arguments of every layer, by the shape of the batch, from the model's own forward without its layers. There
    is one recorder per rank."""

    octopipe_no_state = True  # only caches, which depend on nothing but shapes (`runtime/stages/places.py`)

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        self._model, self._anatomy = model, anatomy
        self._shells: dict[Any, tuple[nn.Module, LayerAnswers]] = {}
        self._known: dict[Any, list[Any]] = {}
        self._in_graphs: set[Any] = set()
        """Shapes whose arguments CUDA graphs read."""
        self._recent: tuple[Any, list[Tensor], list[Any]] | None = None

    def arguments(self, layer: int, hidden: Tensor, dtype: torch.dtype, side: Mapping[str, Tensor]) -> Any:
        """The flattened arguments of one layer, their structure, and the position of the hidden state among them."""
        d = self._anatomy.batch_dim
        key = (hidden.shape[d], hidden.shape[d + 1], hidden.device, dtype)
        if not side:
            found = self._known.get(key)
            if found is None:
                found = self._record(key, {})
                others = [k for k in self._known if k not in self._in_graphs]
                if len(others) >= REMEMBERED:
                    del self._known[others[0]]
                self._known[key] = found
            if hidden.is_cuda and torch.cuda.is_current_stream_capturing():
                self._in_graphs.add(key)  # a graph reads these very tensors from now on
            return found[layer]
        # Masks change with every micro-batch; within one, all layers of a stage see the same tensors.
        tensors = [side[name] for name in sorted(side)]
        recent = self._recent
        if recent is None or recent[0] != (key, *sorted(side)) or any(a is not b for a, b in zip(recent[1], tensors)):
            recent = self._recent = ((key, *sorted(side)), tensors, self._record(key, side))
        return recent[2][layer]

    def _record(self, key: Any, side: Mapping[str, Tensor]) -> list[Any]:
        batch, tokens, device, dtype = key
        shell = self._shells.get((device, dtype))
        if shell is None:
            shell = self._shells[device, dtype] = self._shell(device, dtype)
        ids = {"input_ids": torch.zeros(batch, tokens, dtype=torch.long, device=device)}
        with torch.inference_mode(False), torch.no_grad():
            return collect(*shell, self._anatomy.num_layers, self._anatomy.returns, {**ids, **side})

    def _shell(self, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, LayerAnswers]:
        def tensor(name: str, old: Tensor) -> Tensor:
            if isinstance(old, nn.Parameter):
                return zeros_like_all_of(old, device, dtype)
            return real_buffer(old, device)

        with torch.no_grad():
            shell, answers = shell_of(self._model, self._anatomy.path, tensor)
        fill_buffers(self._model, shell)
        shell.eval()
        for module in shell.modules():
            module.requires_grad_(False)
        return shell, answers


class Embed(nn.Module):
    """Everything that precedes the first layer."""

    def __init__(self, shell: nn.Module, answers: LayerAnswers, anatomy: Anatomy):
        super().__init__()
        self.model = shell
        self._answers, self._anatomy = answers, anatomy

    def forward(self, batch: Any) -> Any:
        anatomy, inputs = self._anatomy, inputs_of(batch)
        stop = 1 + max((k for k, _ in anatomy.carried), default=0)
        got = collect(self.model, self._answers, stop, anatomy.returns, inputs)
        leaves, _, at = got[0]
        beside = {name: inputs[name] for name in SIDE if name in inputs}
        if anatomy.needs_ids:
            beside["input_ids"] = inputs["input_ids"]
        for number, (k, i) in enumerate(anatomy.carried):
            beside[f"carried_{number}"] = got[k][0][i]
        return {"hidden": leaves[at], **beside} if beside else leaves[at]

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        """The embedding of a part of the vocabulary, zero for all other tokens, so that the sum over the shards is the
        whole embedding."""
        out = self.model.get_input_embeddings()  # type: ignore[operator]
        paths = [name for name, module in self.named_modules() if module is out]
        if not paths or not isinstance(out, nn.Embedding):
            raise OctoPipeError(
                f"the embedding of {type(self.model).__name__} is not a plain lookup and cannot be cut; use a plan "
                "with a whole embedding"
            )
        path = f"{paths[0]}.weight"
        found = [masked_embedding(*with_rows(self, path, k, count)[:2], paths[0]) for k in range(count)]
        ids = torch.arange(min(8, out.num_embeddings), device=out.weight.device)[None]
        with torch.no_grad():
            whole, parts = self(ids), [shard(ids) for shard in found]
        plain = isinstance(whole, Tensor) and torch.allclose(sum(parts), whole, rtol=1e-3, atol=1e-3)
        if not plain:
            raise OctoPipeError(
                f"{type(self.model).__name__} does more before its first layer than look up its embedding, so that "
                "shards of it do not add up; use a plan with a whole embedding"
            )
        start = with_rows(self, path, number, count)[1]
        return marked(found[number], start, dict.fromkeys(names_of(self, path), out.num_embeddings))


class Block(nn.Module):
    """One of the model's layers, called with the arguments that the model gives it."""

    def __init__(self, layer: nn.Module, number: int, anatomy: Anatomy, recorder: Recorder, routers: Any = None):
        super().__init__()
        self.layer = layer
        self._number, self._anatomy, self._recorder, self._routers = number, anatomy, recorder, routers
        self._takes = anatomy.takes[number]
        self._drops = {f"carried_{n}" for n in range(len(anatomy.carried)) if anatomy.last_use(n) == number}
        self._dtype = next((p.dtype for p in layer.parameters() if p.is_floating_point()), torch.float32)

    def forward(self, value: Any) -> Any:
        hidden, beside = (value, {}) if isinstance(value, Tensor) else (value["hidden"], value)
        side = {name: beside[name] for name in ("input_ids", *SIDE) if name in beside}
        dtype = next((p.dtype for p in self.layer.parameters() if p.is_floating_point()), self._dtype)
        leaves, structure, at = self._recorder.arguments(self._number, hidden, dtype, side)
        leaves = list(leaves)
        leaves[at] = hidden
        for i, number in self._takes.items():
            leaves[i] = beside[f"carried_{number}"]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        with self._recording() as heard:
            out = self.layer(*args, **kwargs)
        out = out[0] if isinstance(out, tuple | list) else out
        if isinstance(value, Tensor) and not heard:
            return out
        kept = {name: item for name, item in beside.items() if name != "hidden" and name not in self._drops}
        made = {f"router_{self._number}_{i}": logits for i, logits in enumerate(heard)}
        return {"hidden": out, **kept, **made} if kept or made else out

    def _recording(self) -> Any:
        return _WithoutRouters() if self._routers is None else self._routers.recording(self.layer)


class _WithoutRouters:
    """A context that records no router logits, for models that do not train their routers."""

    def __enter__(self) -> list[Tensor]:
        return []

    def __exit__(self, *_: object) -> None:
        return None


def behind_layers(
    anatomy: Anatomy,
    answers: LayerAnswers,
    hidden: Tensor,
    beside: Mapping[str, Tensor],
    run: Callable[[dict[str, Tensor]], Any],
) -> Any:
    """The result of `run(inputs)`, a call of a shell's own code, if the last layer returns `hidden`."""
    d = anatomy.batch_dim
    ids = torch.zeros(hidden.shape[d : d + 2], dtype=torch.long, device=hidden.device)
    inputs = {"input_ids": ids, **{n: beside[n] for n in ("input_ids", *SIDE) if n in beside}}

    def visit(k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if k == anatomy.num_layers - 1:
            out = hidden
        else:
            leaves, _ = leaves_of(args, kwargs)
            out = next(x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
        return as_layer_returns(out, anatomy.returns)

    with answers.given_by(visit), Unpacked(inputs):
        return run(inputs)


class Head(nn.Module):
    """Everything that follows the last layer: the model's own norm, its projection, and what it applies to the
    logits."""

    def __init__(
        self, shell: nn.Module, answers: LayerAnswers, anatomy: Anatomy, missing: list[tuple[str, Tensor]], routers: Any
    ):
        """`missing`: parameters of the embedding, of which the shell's forward needs only the shapes."""
        super().__init__()
        self.model = shell
        self._answers, self._anatomy, self._missing, self._routers = answers, anatomy, missing, routers
        self._on: torch.device | None = None

    def forward(self, value: Any) -> Any:
        hidden, beside = (value, {}) if isinstance(value, Tensor) else (value["hidden"], value)
        if self._on != hidden.device:
            self._placeholders_on(hidden.device)

        def run(inputs: dict[str, Tensor]) -> Any:
            if self._routers is None:
                return self.model(**inputs, use_cache=False).logits
            said = {name: logits for name, logits in beside.items() if name.startswith("router_")}
            with self._routers.returning(self.model, said):
                out = self.model(**inputs, use_cache=False)
            return out.logits, out.aux_loss

        return behind_layers(self._anatomy, self._answers, hidden, beside, run)

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        """A part of the vocabulary, with a copy of everything before the projection (`runtime/stages/shards.py`)."""
        out = self.model.get_output_embeddings()  # type: ignore[operator]
        if self._routers is not None:
            raise OctoPipeError(
                f"the head of {type(self.model).__name__} cannot be cut: it adds the routers' loss "
                "(output_router_logits); use a plan with a whole head"
            )
        shard = linear_shard(self, out, number, count)
        if not out.weight.is_meta and not self._agrees(shard, out.weight.device):
            raise OctoPipeError(
                f"the head of {type(self.model).__name__} cannot be cut: what follows its projection depends on the "
                "whole vocabulary (it leaves out or masks a part of it); use a plan with a whole head"
            )
        return shard

    def _agrees(self, shard: nn.Module, device: torch.device) -> bool:
        """Whether the logits of a shard are those of the whole head, for some random hidden states."""
        ids = {"input_ids": torch.zeros(1, 4, dtype=torch.long, device=device)}
        self._placeholders_on(device)
        with torch.no_grad():
            leaves, _, at = collect(self.model, self._answers, 1, self._anatomy.returns, ids)[0]
            drawn = torch.randn(leaves[at].shape, generator=torch.Generator().manual_seed(0))
            hidden = drawn.to(device=device, dtype=leaves[at].dtype)
            whole, part = self(hidden), shard(hidden)
        start, cut = int(shard.shard_start), cast("dict[str, int]", shard.cut_parameters)  # type: ignore[arg-type]
        name, words = next(iter(cut.items()))
        wanted = whole[..., start : start + shard.get_parameter(name).shape[0]]
        if whole.shape[-1] != words:  # also refused by the ranks whose own part is complete
            return False
        # Products of other sizes round differently.
        close = {"rtol": 2e-2, "atol": 2e-2 * float(wanted.abs().float().median())}
        return part.shape == wanted.shape and torch.allclose(part.float(), wanted.float(), equal_nan=True, **close)

    def _placeholders_on(self, device: torch.device) -> None:
        placeholders_on(self.model, self._missing, device)
        self._on = device


def linear_shard(piece: nn.Module, out: nn.Module, number: int, count: int) -> nn.Module:
    """A copy of a piece that shares everything but the projection to the vocabulary, of which it has only some rows."""
    paths = [name for name, module in piece.named_modules() if module is out]
    if not paths or type(out) is not nn.Linear:
        name = type(piece.model).__name__
        raise OctoPipeError(
            f"the head of {name} cannot be cut: its projection to the vocabulary is not a plain nn.Linear; use a plan "
            "with a whole head"
        )
    cut: dict[str, int] = {}
    shard = piece
    for name in ("weight", "bias") if out.bias is not None else ("weight",):
        path = f"{paths[0]}.{name}"
        names = names_of(shard, path)
        shard, start, rows = with_rows(shard, path, number, count)
        cut |= dict.fromkeys(names, rows)
    return marked(shard, start, cut)
