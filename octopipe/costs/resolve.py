"""Turns whatever a user passes as MODEL into a CostTable.

Knows: that a model is the name of a preset, the name of measured times (`measured/`), a layer-times file, a Hugging
Face config (file or folder), layer times recorded by another tool, or a file with a "format" key; and the keywords that
go with it. Does not know: how each of them is read (their own modules) or priced (`analytic/`).

>>> resolve_costs("llama3-8b", pp=4, tp=8).num_layers
34
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import letters, read_json_object, shown, stem_of
from octopipe.costs.analytic.table import setup_costs
from octopipe.costs.cluster.asking import keywords
from octopipe.costs.cluster.fields import fields_of
from octopipe.costs.cluster.file import Nodes, memory_bytes, network_of, ranks_on
from octopipe.costs.cluster.hardware import GIB, Link, Network
from octopipe.costs.cluster.hardware import gpu as gpu_preset
from octopipe.costs.cluster.setup import DEFAULT_GPU, DEFAULT_SEQ, Setup, default_reserve_gib
from octopipe.costs.foreign_times import foreign_costs
from octopipe.costs.layer_times import costs_of_layer_times
from octopipe.costs.measured import measured_file, measured_models
from octopipe.costs.profile_file import profile_from_object
from octopipe.costs.routing import cannot_change
from octopipe.costs.table import CostTable
from octopipe.models.lengths import Batch
from octopipe.models.readers.hf_config import from_config
from octopipe.models.spec import ModelSpec
from octopipe.models.towers import Join
from octopipe.models.zoo import PRESETS, names, preset, suggestion

if TYPE_CHECKING:
    from typing import Unpack

    from octopipe.costs.cluster.keywords import SetupKeywords

OTHER_FILES = {
    ".csv": "no layer times were found; give a line of layer names and a line of milliseconds",
    ".sqlite": "not an export of Nsight Systems; write it with nsys export --type sqlite",
    ".gz": "not a packed trace of torch.profiler; export it again",
    ".toml": "a TOML file is no model; give a preset, a JSON file or a recording",
}
"""What the error for such a file says if it holds no model."""
FILE_ENDINGS = (".json", ".csv", ".sqlite", ".gz", ".toml")
"""A name with one of these endings means a file, even if no such file exists."""

Reader = Callable[[Mapping[str, object], str, str], CostTable]


def _json_object(path: Path) -> dict[str, object]:
    """Return the object in a model's JSON file. The error for a file of another kind says what such a file holds."""
    try:
        return read_json_object(path)
    except OctoPipeError:
        if path.suffix not in OTHER_FILES or not path.is_file():
            raise
        raise OctoPipeError(f"{shown(path)}: {OTHER_FILES[path.suffix]} (docs/guides/profiles.md)") from None


def _layer_times(file: Mapping[str, object], name: str, where: str) -> CostTable:
    return costs_of_layer_times(file, name=name, where=where)


def _profile(file: Mapping[str, object], name: str, where: str) -> CostTable:
    return profile_from_object(file, name=name, where=where).costs


FORMATS: Mapping[str, Reader] = MappingProxyType({"octopipe.layer-times": _layer_times, "octopipe.profile": _profile})
"""The "format" key of a file, without its `/version`, and the function that reads such a file. A profile is a
layer-times file with additional keys."""


def resolve_spec(model: str | Path | ModelSpec) -> ModelSpec | None:
    """Return the layers of MODEL, or None if only its times are known (a layer-times file)."""
    found = _find(model)
    return found if isinstance(found, ModelSpec) else None


def resolve_measured(model: str | Path | ModelSpec) -> CostTable | None:
    """Return the costs in MODEL if it is a file of times, or None if it has layers to price."""
    found = _find(model)
    return found if isinstance(found, CostTable) else None


def _find(model: str | Path | ModelSpec) -> ModelSpec | CostTable:
    """Return the spec of a preset or config, or the costs in a file of times."""
    if isinstance(model, ModelSpec):
        return model
    name = str(model)
    if name != letters(name):
        raise OctoPipeError(f"{shown(name)}: the file's name is not UTF-8; rename it, so that plans can name it")
    if name in PRESETS:
        return preset(name)
    path = measured_file(name) or Path(name)
    try:
        if path.is_dir() and (path / "config.json").exists():
            path = path / "config.json"
        meant = name.partition("/")[0] in {known.partition("/")[0] for known in measured_models()}
        is_path = os.path.lexists(path) or (os.sep in name and not meant)
        is_path = is_path or name.endswith(FILE_ENDINGS)
    except (OSError, ValueError):
        is_path = True  # read_json_object raises the error that says what is wrong
    if not name or not is_path:
        shown_name = shown(name[:80])
        nearest = suggestion(name[:80], [*names(), *measured_models()])
        raise OctoPipeError(
            f"unknown model {shown_name!r}{nearest}; give a preset (`octopipe models` lists them), "
            "a layer-times file or a Hugging Face config.json"
        )
    recorded = foreign_costs(path)
    if recorded is not None:
        return recorded
    file, where = _json_object(path), shown(path)
    tag = file.get("format")
    if isinstance(tag, str):
        reader = FORMATS.get(tag.split("/")[0])
        if reader is None and tag.startswith("octopipe.plan/"):
            raise OctoPipeError(
                f"{where}: this is a plan, not a model; give it as --plan (simulate, train), as --start (tune), or to "
                "check, report, validate and export"
            )
        if reader is None:
            known = ", ".join(sorted(FORMATS))
            raise OctoPipeError(
                f"{where}: format {tag[:60]!r} is not a model; give a file of format {known}, or a preset"
            )
        return reader(file, stem_of(path), where)
    if "pattern" in file or "forward_ms" in file:
        return _layer_times(file, stem_of(path), where)
    if "model_type" in file or "architectures" in file or "hidden_size" in file or "text_config" in file:
        return from_config(
            file, name=letters(path.parent.name) if path.name == "config.json" else stem_of(path), where=where
        )
    raise OctoPipeError(
        f'{where}: neither a layer-times file ("pattern", "forward_ms", ...) nor a Hugging Face config '
        '("model_type", ...); check the file'
    )


def tensor_parallel(spec: ModelSpec, setup: Setup) -> int:
    """Return the smallest power of two at which weights, gradients and optimizer state of an even share of the model
    take at most half of a GPU.

    Only sizes that divide a node, all heads and all feed-forward widths are considered; if none of them suffices,
    return the largest.
    """
    best, cluster = 1, setup.cluster()
    for tp in (1, 2, 4, 8, 16, 32, 64):
        sizes = (getattr(p, n, None) for x in spec for p in x.parts for n in ("heads", "value_heads", "ffn"))
        if cluster.node_size % tp or any(isinstance(size, int) and size % tp for size in sizes):
            break
        best = tp
        if spec.training_parameters * 18 / (tp * setup.pp) <= setup.gpu_memory_gib * GIB / 2:
            break
    return best


def resolve_costs(
    model: str | Path | ModelSpec, *, pp: int, micro_batches: int | None = None, **given: Unpack[SetupKeywords]
) -> CostTable:
    """Return the costs of MODEL on `pp` pipeline ranks; `CostTable.setup` states the set-up that they apply to.

    Keywords are the fields of `Setup` (costs/cluster/setup.py); None is the same as leaving a keyword out. Defaults:
    `gpu`: an h800. `tp`: the smallest that fits (see `tensor_parallel`), or 1 for a file of times, whose times already
    include its effect. `seq`: 4096 tokens, or what the file of times states. `memory_gib`: the GPU's memory less a
    reserve, or no limit for a file of times. `p2p_ms` is the time of every transfer. `nodes` is a cluster file, or the
    contents of one.
    """
    asked, spelled = _read({"pp": pp, "micro_batches": micro_batches, **given})
    for name, counts in (("memory_gib", (0, 1, pp)), ("speeds", (0, pp))):
        entries = len(asked.get(name, ()))
        if entries not in counts:
            allowed = "one, or one per rank" if 1 in counts else "one per rank"
            raise OctoPipeError(f"{spelled[name]} has {entries} entries for {pp} ranks; give {allowed}")
    groups: Nodes = asked.get("nodes", ())
    gpu_given = "gpu" in asked or bool(groups)
    if groups and any(asked.get(name) for name in ("gpu", "speeds", "memory_gib", "gpus_per_node")):
        raise OctoPipeError("the cluster file says which GPUs there are; leave gpu, speeds and memory_gib out")
    found = _find(model)
    if found.num_layers < pp:
        raise OctoPipeError(
            f"pp {pp} is more than the {found.num_layers} layers of {shown(str(model)[:80])}; "
            f"give at most {found.num_layers}"
        )
    if groups:
        kinds = (gpu_preset(name) for name, _, _ in groups)
        asked["gpu"] = max(kinds, key=lambda g: g.bf16_tflops * g.clock)
    setup = Setup(**{"gpu": gpu_preset(DEFAULT_GPU), "seq": None, **asked})
    batch = None
    if setup.micro_batch_lengths:
        batch = Batch(groups=setup.micro_batch_lengths, packed=setup.packed)
        setup = _with_batch(setup, batch)
    if isinstance(found, CostTable):
        if batch is not None:
            raise OctoPipeError(
                f"{found.model}: lengths need a preset or a config; a file of times covers one length only"
            )
        return _measured(found, setup, gpu_given=gpu_given, reroute="imbalance" in asked)
    setup = replace(setup, seq=default_seq(found) if setup.seq is None else setup.seq)
    if setup.listed_sequences > 1 and setup.micro_batches is None:
        setup = setup.with_micro_batches(max(1, setup.listed_sequences // setup.micro_batch_size))
    if "tp" not in asked:
        setup = replace(setup, tp=tensor_parallel(found, setup))
    table = costs_of_setup(found, setup, micro_batch_tokens=setup.micro_batch_tokens or None, batch=batch)
    if batch is None or setup.tokens_per_pipeline is None:
        return table
    share = setup.tokens_per_pipeline / batch.tokens
    return table.replace(
        tokens_per_micro_batch=max(1, round(setup.tokens_per_pipeline / len(batch.groups))),
        model_flops=None if table.model_flops is None else share * table.model_flops,
    )


def default_seq(spec: ModelSpec) -> int:
    """Return the default sequence length, but at most the positions that an encoder-decoder's decoder has learned."""
    learned = [join.embedding.positions for join in spec if isinstance(join, Join) and join.embedding is not None]
    return min([DEFAULT_SEQ, *(count for count in learned if count)])


def _read(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the given values as `Setup` stores them, by field, and the keyword that the caller used for each field."""
    asked: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for word, value in given.items():
        if value is None:
            if word == "pp":
                raise OctoPipeError("pp is None; give a whole number >= 1")
            continue
        [(name, value)] = ({word: value} if word in ("pp", "micro_batches") else keywords({word: value})).items()
        if name in asked:
            raise OctoPipeError(f"{spelled[name]} and {word} are the same keyword; give one of them")
        asked[name] = fields_of(Setup)[name].read(word, value)
        if asked[name] == () != value and word.startswith("micro_batch_"):
            raise OctoPipeError(f"{word} is empty; give one entry per micro-batch")
        spelled[name] = word
    return asked, spelled


def _with_batch(setup: Setup, batch: Batch) -> Setup:
    """Return the set-up for sequences of different lengths.

    It states the length and size of the micro-batch with the most tokens, which prices are relative to.
    """
    if setup.micro_batch_size != 1:
        raise OctoPipeError("micro_batch_lengths says what is in every micro-batch; leave micro_batch_size out")
    largest = max(batch.groups, key=batch.tokens_of)
    seq, size = (sum(largest), 1) if batch.packed else (max(largest), len(largest))
    seq = -(-seq // (2 * setup.cp)) * 2 * setup.cp if setup.cp > 1 else seq
    if setup.micro_batches not in (None, len(batch.groups)):
        raise OctoPipeError(
            f"lengths of {len(batch.groups)} micro-batches for {setup.micro_batches} micro-batches; give one group each"
        )
    return replace(
        setup,
        seq=seq,
        micro_batch_size=size,
        micro_batches=len(batch.groups),
        samples=batch.samples,
        batch=batch.words(),
    )


def costs_of_setup(
    spec: ModelSpec, setup: Setup, *, micro_batch_tokens: Sequence[int] | None = None, batch: Batch | None = None
) -> CostTable:
    """Return the costs of a model under a set-up, including unequal nodes and a fixed transfer time."""
    table = setup_costs(spec, setup, micro_batch_tokens=micro_batch_tokens, batch=batch)
    if setup.nodes:
        ranks = ranks_on(setup.nodes, setup.pp, setup.tp * setup.cp * setup.dp)
        whole = {
            (kind.name, size): float(
                setup_costs(spec, replace(setup, gpu=kind, nodes=(), gpus_per_node=size)).layer_ms.sum()
            )
            for kind, size in {(rank.gpu, rank.node_gpus) for rank in ranks}
        }
        reference = float(table.layer_ms.sum())
        table = table.replace(
            network=network_of(ranks),
            rank_slowdown=tuple(whole[rank.gpu.name, rank.node_gpus] / reference for rank in ranks),
            rank_memory_bytes=memory_bytes(ranks, setup.reserve_gib, default_reserve_gib),
        )
    return table if setup.p2p_ms is None else table.replace(network=Network.constant(setup.p2p_ms))


def _measured(table: CostTable, setup: Setup, *, gpu_given: bool, reroute: bool) -> CostTable:
    """Return the costs in a file of times, completed with the set-up's links, rank speeds, memory and sizes.

    `gpu_given`: whether the user named a GPU, whose links to its host and between nodes then count. `reroute`: convert
    the times to the set-up's spread of tokens over experts.
    """
    if setup.micro_batch_tokens:
        raise OctoPipeError(
            f"{table.model}: micro_batch_tokens needs a preset or a config; a file of times covers one length only"
        )
    if setup.dp > 1 and table.gradient_bytes.any() and table.reduction == Link() and not gpu_given:
        raise OctoPipeError(
            f"{table.model}: the link over which {setup.dp} pipelines sum their gradients is not known; give "
            "--gpu (gpu), whose links between nodes are then used, or leave dp out"
        )
    cluster = setup.cluster()
    tokens = table.tokens_per_micro_batch
    if tokens is None and setup.seq is not None:
        tokens = setup.seq * setup.micro_batch_size
    # Without boundary sizes nothing is known about transfers: they cost nothing unless p2p_ms says so.
    # A profile brings its own measured links and rank speeds.
    network = cluster.network() if table.boundary_bytes.any() else Network.constant(0.0)
    if table.network.pairs:
        network = table.network
    if setup.p2p_ms is not None:
        network = Network.constant(setup.p2p_ms)
    # The times already include the effects of fields that are `of_a_model` (precision, ...): the set-up states none.
    fields = {name: getattr(setup, name) for name, how in fields_of(Setup).items() if not how.of_a_model}
    reserve = setup.reserve_gib if setup.memory_gib else None
    own = table.setup or Setup(gpu=None)
    rows = 1 if tokens is None else own.micro_batch_size
    size = {"seq": None if tokens is None else tokens // rows, "micro_batch_size": rows}
    size |= {name: getattr(own, name) for name in ("images", "recordings", "encoder_seq", "frozen")}
    known = Setup(**{**fields, **size, "gpu": None, "tp": setup.tp, "reserve_gib": reserve})
    if reroute and not cannot_change(table.routing, table.segments):
        table, known = table.with_imbalance(setup.imbalance), replace(known, imbalance=setup.imbalance)
    limits = known.rank_memory_bytes() if setup.memory_gib else table.rank_memory_bytes
    if setup.reserve_gib and limits and not setup.memory_gib:
        limits = tuple(limit - setup.reserve_gib * GIB for limit in limits)
    return table.replace(
        network=network,
        copy_sum=table.copy_sum if network is table.network else None,
        host_link=setup.host_link or table.host_link or (cluster.host_link if gpu_given else None),
        rank_slowdown=cluster.rank_slowdown() or table.rank_slowdown,
        rank_memory_bytes=limits,
        tokens_per_micro_batch=tokens,
        gpus_per_rank=setup.tp,
        data_parallel=setup.dp,
        reduction=cluster.inter_link if setup.dp > 1 and gpu_given else table.reduction,
        setup=known,
    )
