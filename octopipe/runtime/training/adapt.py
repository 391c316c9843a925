"""Adaptation during training: corrects costs with measured times, and switches to a better plan if that is worthwhile.

Knows: how measured op times correct a cost table, when another plan is worth switching to, and how layers and optimizer
state are moved to their new ranks. Does not know: what is trained or how steps run.

    adapter = Adapter(profile, threshold=0.05)
    adapter.observe(pipe.plan, pipe.timeline())                 # after some step
    plan = adapter.propose(pipe.plan, pipe.world)               # None, or a plan that is worth it
    if plan is not None:
        pipe, optimizer = switch(pipe, optimizer, plan, make_pipe=..., make_optimizer=...)

The new pipeline has bitwise the same parameters, buffers and optimizer state as the old one, so the loss curve
continues unchanged (up to the order in which a plan accumulates its micro-batches).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from octopipe.base.errors import OctoPipeError
from octopipe.costs.profile_file import Profile
from octopipe.costs.table import CostTable
from octopipe.plans.plan import KINDS, Plan
from octopipe.plans.price import stage_times
from octopipe.runtime.pipeline import Pipeline
from octopipe.runtime.precision import MixedPrecisionOptimizer
from octopipe.runtime.ranks.reduce import local
from octopipe.runtime.ranks.world import World
from octopipe.runtime.training.saved_state import (
    compact,
    layer_state,
    loadable,
    make_late_buffers,
    put_settings,
    put_state,
    settings_by_parameter,
)
from octopipe.runtime.wire.telling import broadcast_value, moment, receive_value, send_value
from octopipe.search.tuner import tune
from octopipe.simulation.contention import predict
from octopipe.simulation.timeline import Timeline

_TIMES = {"F": "forward_ms", "I": "input_ms", "W": "weight_ms"}
_RIDGE = 1e-3
"""The weight of the ridge term. It is small, so it only decides between explanations that fit equally well, in favour
of no change."""


class Adapter:
    """Adapts the costs to measurements, and decides when to switch to another plan."""

    def __init__(
        self,
        profile: Profile,
        *,
        threshold: float = 0.05,
        budget_s: float = 10.0,
        blend: float = 0.5,
        seed: int = 0,
        recompute: bool = False,
    ):
        """`threshold`: the least predicted gain (0.05: 5 %) for which a switch is worthwhile. `blend`: the share of a
        correction that one observation applies (1: all of it)."""
        if not 0 < threshold < 10 or not 0 < blend <= 1 or budget_s <= 0:
            raise OctoPipeError(
                f"threshold {threshold}, blend {blend}, budget {budget_s} s; give numbers > 0 and a blend of at most 1"
            )
        self.profile, self.threshold, self.budget_s, self.blend = profile, threshold, budget_s, blend
        self.seed, self.recompute = seed, recompute
        self.last_gain = 0.0
        """The predicted gain of the plan that `propose` considered last."""

    def observe(self, plan: Plan, timeline: Timeline) -> None:
        """Correct the costs by one measured step."""
        costs = corrected(self.profile.costs, plan, timeline, blend=self.blend)
        # Times with fewer busy ranks are corrected by the same factors as the times with all ranks busy.
        before, partial = self.profile.costs, {}
        for level, table in self.profile.partial.items():
            times = {
                name: getattr(table, name)
                * np.divide(
                    getattr(costs, name),
                    getattr(before, name),
                    out=np.ones(costs.num_layers),
                    where=getattr(before, name) > 0,
                )
                for name in _TIMES.values()
            }
            partial[level] = costs.replace(**times)
        self.profile = replace(self.profile, costs=costs, partial=partial)

    def propose(self, plan: Plan, world: World | None = None) -> Plan | None:
        """Return a plan predicted to be faster by more than the threshold, or None (collective: rank 0 searches)."""
        found: tuple[Plan | None, float] = (None, 0.0)
        if world is None or world.rank == 0:
            found = self._search(plan)
        if world is not None and world.control is not None:
            with moment("while rank 0 looked for a better plan"):
                found = broadcast_value(world.control, found, 0)
        self.last_gain = float(found[1])
        return found[0]

    def _search(self, plan: Plan) -> tuple[Plan | None, float]:
        found = tune(
            self.profile.costs,
            plan.num_ranks,
            plan.num_micro_batches,
            budget_s=self.budget_s,
            seed=self.seed,
            start=plan,
            recompute=self.recompute,
        ).plan
        now, then = predict(plan, self.profile).makespan_ms, predict(found, self.profile).makespan_ms
        gain = now / then - 1.0 if then > 0 else 0.0
        return (found if gain > self.threshold else None), gain


def corrected(costs: CostTable, plan: Plan, timeline: Timeline, *, blend: float = 1.0) -> CostTable:
    """Return the costs that explain a measured step: one factor per layer kind and op kind, and one per rank.

    Every stage and op kind gives one equation: log(measured / predicted) is the log of the rank's factor plus the mean
    of its layers' log factors, weighted by their shares of the time. Least squares separate slow ranks from mispriced
    layers.
    """
    spans = timeline.spans
    took = spans.end_ms - spans.start_ms
    table = plan.table()
    if not np.array_equal(spans.stage, table.stage) or not np.array_equal(spans.kind, table.kind.astype(np.int32)):
        raise OctoPipeError("the timeline belongs to another plan; observe a step of the plan that ran")
    predicted = stage_times(plan, costs)
    symbols = list(dict.fromkeys(costs.symbols))
    column = {(s, kind): i for i, (s, kind) in enumerate((s, k) for s in symbols for k in _TIMES)}
    unknowns = len(column) + plan.num_ranks
    rows, values = [], []
    for s, stage in enumerate(plan.stages):
        for code, kind in enumerate(KINDS):
            mine = (spans.stage == s) & (spans.kind == code)
            expected = float(np.median(predicted[code, s]))
            if not mine.any() or expected <= 0:
                continue
            seen = float(np.median(took[mine]))
            if seen <= 0:
                continue
            row = np.zeros(unknowns)
            layers = stage.recomputed_layers if kind == "R" else range(stage.first, stage.stop)
            for k in layers:
                for part in {"B": ("I", "W"), "R": ("F",)}.get(kind, (kind,)):
                    share = float(getattr(costs, _TIMES[part])[k]) * costs.slowdown(stage.rank) / expected
                    row[column[costs.symbols[k], part]] += share
            row[len(column) + stage.rank] = 1.0
            weight = np.sqrt(expected * int(mine.sum()))
            rows.append(row * weight)
            values.append(np.log(seen / expected) * weight)
    if not rows:
        return costs
    design, goal = np.array(rows), np.array(values)
    ridge = np.sqrt(_RIDGE) * np.linalg.norm(design) / np.sqrt(unknowns)
    answer, *_ = np.linalg.lstsq(
        np.vstack([design, ridge * np.eye(unknowns)]), np.concatenate([goal, np.zeros(unknowns)]), rcond=None
    )
    factors = np.exp(blend * answer)
    times = {
        name: getattr(costs, name) * np.array([factors[column[x, kind]] for x in costs.symbols])
        for kind, name in _TIMES.items()
    }
    slow = np.array([costs.slowdown(r) for r in range(plan.num_ranks)]) * factors[len(column) :]
    return costs.replace(rank_slowdown=tuple(float(x) for x in slow), **times)


def switch(
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | None,
    plan: Plan,
    *,
    make_pipe: Callable[[Plan], Pipeline],
    make_optimizer: Callable[[Pipeline], torch.optim.Optimizer] | None = None,
) -> tuple[Pipeline, torch.optim.Optimizer | None]:
    """Return a new pipeline and optimizer for another plan, with the state of the old ones (collective; between steps).

    `make_pipe` builds the pipeline of the new plan on the same ranks, `make_optimizer` an optimizer for it with the
    same settings. The old pipeline is closed.
    """
    world = pipe.world
    mine: dict[int, dict[str, Any]] = {}
    problem = _unfinished(pipe)
    if pipe.plan.shards() or plan.shards():
        problem = "a layer that is split over ranks cannot change its plan during a run; save a checkpoint and load it"
    if not problem and isinstance(optimizer, MixedPrecisionOptimizer) and optimizer.owners is not None:
        problem = (
            "the optimizer's state is divided over data-parallel pipelines, and switching supports one pipeline only; "
            "save a checkpoint and load it under the other plan"
        )
    if not problem:
        try:
            mine = _layer_states(pipe, optimizer)
        except OctoPipeError as error:
            problem = str(error)
    problem = next((text for text in world.gather(problem) if text), "")
    if problem:
        raise OctoPipeError(problem)
    old, step, parent = pipe.plan, pipe.step_number, pipe.resumed_from
    scale = pipe.loss_scale
    pipe.close()
    fresh = make_pipe(plan)
    states = _exchange(world, old, plan, mine, loss=fresh.layers.has_loss)
    for k, module in fresh.modules().items():
        make_late_buffers(module, loadable(states[k]["state"]))
    fresh.load_state_dict({f"{k}.{n}": v for k, kept in states.items() for n, v in loadable(kept["state"]).items()})
    for k, module in fresh.modules().items():
        _put_beside(module, states[k])
    fresh.step_number, fresh.loss_scale, fresh.resumed_from = step, scale, parent
    if optimizer is None or make_optimizer is None:
        return fresh, None
    made = make_optimizer(fresh)
    kept: list[tuple[str, torch.Tensor, Any]] = []
    names = {id(p): name for name, p in fresh.named_parameters()}
    for shared in fresh.layers.shared():
        if isinstance(made, MixedPrecisionOptimizer):
            number, name = names[id(shared.parameter)].split(".", 1)
            made.set_master(shared.parameter, states[int(number)]["state"][name].to(shared.parameter.device))
        for member in (int(shared.key.split(".", 1)[0]), *shared.layers):
            saved = states.get(member, {}).get("optimizer", {}).get(shared.key)
            if saved is not None:
                put_state(made, shared.parameter, saved["state"])
                kept.append((shared.key, shared.parameter, saved["settings"]))
                break
    put_settings(made, kept)
    return fresh, made


def _unfinished(pipe: Pipeline) -> str:
    """Describe, in one line, the gradients that would be lost; empty if there are none."""
    for name, p in pipe.named_parameters():
        if p.grad is not None and bool((local(p.grad) != 0).any()):
            return (
                f"{name} has a gradient, which switching plans would lose; step the optimizer and "
                f"call zero_grad() first"
            )
    return ""


def _holders(plan: Plan) -> dict[int, list[int]]:
    out: dict[int, set[int]] = {}
    for stage in plan.stages:
        for k in range(stage.first, stage.stop):
            out.setdefault(k, set()).add(stage.rank)
    return {k: sorted(ranks) for k, ranks in out.items()}


def _layer_states(pipe: Pipeline, optimizer: torch.optim.Optimizer | None) -> dict[int, dict[str, Any]]:
    """Return this rank's layers with the optimizer state of their parameters (of a tied parameter under its first
    name)."""
    out: dict[int, dict[str, Any]] = {
        k: {"state": layer_state(k, module, optimizer), "beside": _beside(module), "optimizer": {}}
        for k, module in pipe.modules().items()
    }
    if optimizer is not None:
        settings = settings_by_parameter(optimizer)
        for shared in pipe.layers.shared():
            p = shared.parameter
            kept = {"state": compact(optimizer.state.get(p, {})), "settings": settings.get(id(p), {})}
            for k in shared.layers:
                out[k]["optimizer"][shared.key] = kept
    return out


def _beside(module: nn.Module) -> dict[str, Any]:
    """Return what a state dict does not contain: buffers that are not saved, the mode of every module, and what is
    frozen."""
    saved = module.state_dict().keys()
    return {
        "buffers": {name: compact(b) for name, b in module.named_buffers() if name not in saved},
        "training": {name: inner.training for name, inner in module.named_modules()},
        "trained": {name: p.requires_grad for name, p in module.named_parameters()},
    }


def _put_beside(module: nn.Module, kept: Mapping[str, Any]) -> None:
    beside = kept["beside"]
    for name, value in beside["buffers"].items():
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner)
        now = getattr(holder, last, None)
        if isinstance(now, torch.Tensor) and now.shape == value.shape and now.dtype == value.dtype:
            with torch.no_grad():
                now.copy_(value)
        else:  # a forward replaces it
            device = next((t.device for t in (*module.parameters(), *module.buffers())), value.device)
            holder.register_buffer(last, value.to(device), persistent=False)
    for name, inner in module.named_modules():
        inner.training = beside["training"].get(name, inner.training)
    for name, p in module.named_parameters():
        p.requires_grad_(beside["trained"].get(name, p.requires_grad))


def _exchange(
    world: World, old: Plan, new: Plan, mine: dict[int, dict[str, Any]], *, loss: bool
) -> dict[int, dict[str, Any]]:
    """Return the states of the layers that this rank has under the new plan; a layer is sent only to ranks that did not
    hold it.

    `loss`: the loss has parameters, and counts as the layer after the last one.
    """
    before, after = _holders(old), _holders(new)
    for holders in (before, after):
        holders[new.num_layers] = holders[new.num_layers - 1]
    out = {}
    for k in range(new.num_layers + loss):
        source = before[k][0]
        receivers = [r for r in after[k] if r not in before[k]]
        if world.rank in after[k] and world.rank in before[k]:
            out[k] = mine[k]
        for receiver in receivers:
            if world.rank == source:
                send_value(world.control, mine[k], receiver)
            elif world.rank == receiver:
                out[k] = receive_value(world.control, source)
    return out
