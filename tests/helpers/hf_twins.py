"""A family's unsplit model beside its layers, on one process or in a pipeline of ranks: the same numbers or not."""

from __future__ import annotations

import copy
import functools
import random
import zlib
from typing import Any

import torch
from hf_families import tiny_config
from random_plans import random_plan
from ranks import PATIENCE_S
from torch import Tensor, nn

from octopipe import CostTable, Pipeline, build_plan, tune
from octopipe.huggingface import LayerList, layers, micro_batches
from octopipe.huggingface.source import config_for, model_class
from octopipe.huggingface.weights import first_names

ROWS, TOKENS = 4, 12


def stir(name: str, parameter: Tensor) -> None:
    """Away from zeros and ones, by the parameter's name: no gradient vanishes by chance, and everybody agrees."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def cut(config: Any, dtype: torch.dtype = torch.float64) -> LayerList:
    return layers(copy.deepcopy(config), dtype=dtype)


def make(parts: LayerList, k: int) -> nn.Module:
    """Layer k in double precision, stirred."""
    module = parts[k]() if not isinstance(parts[k], nn.Module) else parts[k]  # type: ignore[operator]
    first = first_names(parts._cut.model)
    for name, parameter in module.named_parameters():
        stir(first[parts.name_in_model(k, name)], parameter)
    return module


def whole(config: Any, modules: list[nn.Module], parts: LayerList) -> nn.Module:
    """The unsplit model, built by transformers, with the layers' weights."""
    cls = model_class(config)
    dtype = next(p.dtype for p in parts._cut.model.parameters() if p.is_floating_point())
    model = cls._from_config(copy.deepcopy(config_for(cls, config)), dtype=dtype, experts_implementation="eager")
    with torch.no_grad():
        for k, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                model.get_parameter(parts.name_in_model(k, name)).copy_(parameter)
            for name, buffer in module.named_buffers():
                assert torch.equal(model.get_buffer(parts.name_in_model(k, name)), buffer), name
    return model.train()


def batch(config: Any, *, padded: bool, right: bool = False) -> dict[str, Tensor]:
    """Tokens and labels; padded on the left (or right), with labels ignored there, where asked."""
    vocab = config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocab, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    if not padded:
        return {"input_ids": ids, "labels": labels}
    mask = torch.ones_like(ids)
    for row, count in enumerate((3, 0, 1, 2)):
        there = slice(TOKENS - count, TOKENS) if right else slice(0, count)
        mask[row, there] = 0
        labels[row, there] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def finite(value: float) -> float:
    """A difference; one that is no number is infinite."""
    return value if value == value else float("inf")


def grads_of(named: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def worst(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest entry; parameters without a gradient must be the same ones."""
    assert mine.keys() == theirs.keys(), mine.keys() ^ theirs.keys()
    assert all(torch.isfinite(g).all() for g in theirs.values())
    return max(finite(float((mine[n] - g).abs().max() / (g.abs().max() + 1e-3))) for n, g in theirs.items())


def chained(model_type: str, dtype: torch.dtype = torch.float64, **changes: Any) -> float:
    """The largest difference of logits, loss and gradients: layers one after another, between those of another
    micro-batch, against the unsplit model."""
    config = tiny_config(model_type, **changes)
    parts = cut(config, dtype)
    modules = [make(parts, k) for k in range(len(parts))]
    model = whole(config, modules, parts)
    first = first_names(model)
    off = 0.0
    for padded in (False, True):
        given = batch(config, padded=padded)
        out = model(**given, use_cache=False)
        if not torch.isfinite(out.logits).all():  # some families know no rows that see nothing at all
            given = batch(config, padded=True, right=True)
            out = model(**given, use_cache=False)
        out.loss.backward()
        value: Any = {k: v for k, v in given.items() if k != "labels"}
        other: Any = {**value, "input_ids": value["input_ids"].flip(0)}
        for module in modules:
            value = module(value)
            with torch.no_grad():  # another micro-batch on the way leaves nothing that this one would read
                other = module(other)
        loss = parts.loss_fn(value, given["labels"])
        loss.backward()
        logits = value if isinstance(value, Tensor) else value[0]
        seen = given.get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
        off = max(off, finite(float((logits - out.logits).detach()[seen].abs().max())))
        off = max(off, finite(abs(float((loss - out.loss).detach()))))
        total: dict[str, Tensor] = {}
        for k, module in enumerate(modules):
            for name, grad in grads_of(module.named_parameters()).items():
                key = first[parts.name_in_model(k, name)]
                total[key] = total[key] + grad if key in total else grad
        off = max(off, worst(total, grads_of(model.named_parameters())))
        for module in (model, *modules):
            module.zero_grad()
    return off


def pipelined(
    world: Any, model_type: str, plans: dict[str, Any], padded: bool, changes: dict[str, Any]
) -> dict[str, tuple[float, dict, Any]]:
    """On a rank: loss, this rank's gradients by name and its logits (None off the last stage), under every plan."""
    torch.set_num_threads(1)
    config = tiny_config(model_type, **changes)
    inputs = batch(config, padded=padded)
    parts = cut(config)
    out = {}
    for name, plan in plans.items():
        made = [_maker(parts, k) for k in range(len(parts))]
        with Pipeline(made, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            rows, labels = micro_batches(inputs, plan.num_micro_batches)
            loss = pipe.step(rows, labels)
            named = {}
            for key, p in pipe.named_parameters():
                k, own = key.split(".", 1)
                named[parts.name_in_model(int(k), own)] = p
            outputs = pipe.forward(rows)
            logits = outputs and torch.cat([row if isinstance(row, Tensor) else row[0] for row in outputs])
            out[name] = (float(loss.detach()), grads_of(named.items()), logits)  # type: ignore[arg-type]
    return out


def _maker(parts: LayerList, k: int) -> Any:
    return lambda: make(parts, k)


def pipeline_differences(
    ranks: Any, model_type: str, plans: dict[str, Any], *, padded: bool, **changes: Any
) -> dict[str, float]:
    """Per plan: the largest difference of the pipeline's logits, loss and gradients from the unsplit model's."""
    config = tiny_config(model_type, **changes)
    parts = cut(config)
    model = whole(config, [make(parts, k) for k in range(len(parts))], parts)
    first = first_names(model)
    given = batch(config, padded=padded)
    total = (given["labels"][:, 1:] != -100).sum()
    # Row by row, as micro-batches of one row are: a router's choice must not depend on the rows beside it.
    each = [
        model(**{k: v[row : row + 1] for k, v in given.items()}, num_items_in_batch=total, use_cache=False)
        for row in range(ROWS)
    ]
    loss = sum(row.loss for row in each)
    loss.backward()
    logits = torch.cat([row.logits.detach() for row in each])
    seen = given.get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
    theirs = grads_of(model.named_parameters())
    found = ranks.run(pipelined, model_type, plans, padded, changes)
    out = {}
    for name in plans:
        mine: dict[str, Tensor] = {}
        for rank in found:
            mine |= {first[key]: grad for key, grad in rank[name][1].items()}
        (outputs,) = [rank[name][2] for rank in found if rank[name][2] is not None]
        off = float((outputs - logits)[seen].abs().max())
        out[name] = max(worst(mine, theirs), finite(off), finite(abs(found[0][name][0] - float(loss.detach()))))
    return out


@functools.cache
def plans(num_layers: int = 6, micro_batches: int = ROWS) -> dict[str, Any]:
    """A plan of every kind on two ranks."""
    costs = CostTable.uniform(num_layers=num_layers, p2p_ms=0.05)
    irregular = random_plan(
        random.Random(5), num_ranks=2, num_layers=num_layers, num_micro_batches=micro_batches, routes=1
    )
    named = {name: build_plan(name, costs, 2, micro_batches) for name in ("1f1b", "zb-v", "interleaved")}
    # What tuning makes of layers as unequal as a hybrid's; moves instead of time, so that it is the same plan anywhere.
    unequal = costs.replace(
        forward_ms=[0.2, *(1.0 + 2.0 * (k % 3 == 1) for k in range(num_layers - 2)), 2.0],
        input_ms=[0.0, *(1.5 + 1.5 * (k % 3 == 1) for k in range(num_layers - 2)), 2.0],
        weight_ms=[0.2, *(0.5 + 1.5 * (k % 3 == 2) for k in range(num_layers - 2)), 2.0],
    )
    tuned = tune(unequal, 2, micro_batches, iterations=300, workers=1, copies=False).plan
    return {**named, "irregular": irregular, "tuned": tuned}
