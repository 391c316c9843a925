"""Hardware files: a GPU, its links and the network around it as a small TOML or JSON file.

Knows: the file format, and how NICs, a power limit and an oversubscribed network change a GPU's figures. Does not know:
unequal nodes (`file.py`), models or rates.

    [gpu]
    like = "h100"               the preset whose figures are used if none are given below
    name = "h100-500w"          its name in the output
    memory_gib = 80             also: bf16_tflops, fp8_tflops, fp4_tflops, hbm_tb_per_s, host_gb_per_s, generation
    power_watts = 500           a limit below the board's own slows the clock by the cube root

    [network]
    gpus_per_node = 8           GPUs on the fast links
    inside_gb_per_s = 450       of a GPU inside its node, per direction
    nics_per_node = 4           with nic_gb_per_s: a GPU's bandwidth to other nodes is its share of all NICs
    nic_gb_per_s = 50           per direction (400 Gbit/s are 50)
    pod_nodes = 32              nodes that reach each other at full speed
    oversubscription = 2.0      how much slower links are beyond a pod

>>> import tempfile, pathlib
>>> file = pathlib.Path(tempfile.mkdtemp()) / "h.toml"
>>> _ = file.write_text('[gpu]\\nlike = "h100"\\npower_watts = 350\\n[network]\\nnics_per_node = 4\\nnic_gb_per_s = 50')
>>> found = read_hardware(file)
>>> round(found.clock, 3), found.inter_gb_per_s
(0.794, 25.0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, check_format, kind_of, read_toml, shown
from octopipe.base.limits import MAX_GPUS, finite
from octopipe.costs.cluster.hardware import GPUS, Gpu, gpu

FORMAT = "octopipe.hardware/1"
FIGURES = ("bf16_tflops", "fp8_tflops", "fp4_tflops", "memory_gib", "hbm_tb_per_s", "host_gb_per_s")
MOST = 1e9
"""Maximum value of any figure in a file."""
OF_GPU = ("like", "name", "generation", "power_watts", *FIGURES)
OF_NETWORK = (
    "gpus_per_node",
    "inside_gb_per_s",
    "between_gb_per_s",
    "nics_per_node",
    "nic_gb_per_s",
    "pod_nodes",
    "oversubscription",
    "flows_per_connection",
)


def read_hardware(path: str | Path) -> Gpu:
    """The GPU that a hardware file describes, its share of the network included."""
    return hardware_from(read_toml(path), shown(path))


def hardware_from(raw: object, where: str = "hardware") -> Gpu:
    """The GPU in an already decoded file."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("gpu"), Mapping):
        raise OctoPipeError(f'{where}: no [gpu]; write `[gpu]`, then `like = "h100"` and the differences')
    _known(raw, ("gpu", "network", "format"), where, "a hardware file has [gpu] and [network]")
    if raw.get("format") is not None:
        check_format(raw["format"], FORMAT, where)
    table, network = raw["gpu"], raw.get("network", {})
    if not isinstance(network, Mapping):
        raise OctoPipeError(f"{where}: network is a {kind_of(network)}; write it as [network]")
    _known(table, OF_GPU, f"{where}: [gpu]", f"one of {', '.join(OF_GPU)}")
    _known(network, OF_NETWORK, f"{where}: [network]", f"one of {', '.join(OF_NETWORK)}")
    found = _base(table, where)
    changes: dict[str, Any] = {name: _number(table, name, where) for name in FIGURES if name in table}
    for name in ("name", "generation"):
        if name in table:
            changes[name] = _word(table[name], f"{where}: [gpu] {name}")
    if "name" not in table:
        changes["name"] = f"{found.name}-like"
    elif changes["name"] in GPUS:
        raise OctoPipeError(f"{where}: [gpu] name {changes['name']!r} is the name of a preset; give another one")
    if "power_watts" in table:
        limit = _number(table, "power_watts", where)
        if found.watts is None:
            raise OctoPipeError(f"{where}: power_watts needs a board whose own limit is known; give like = a preset")
        # Power grows with the cube of the clock; a higher limit than the board's changes nothing.
        changes["clock"] = found.clock * min(1.0, limit / found.watts) ** (1 / 3)
        changes["watts"] = min(limit, found.watts)
    return replace(found, **changes, **_links(found, network, where))


def _base(table: Mapping[str, Any], where: str) -> Gpu:
    if "like" in table:
        try:
            return gpu(_word(table["like"], f"{where}: [gpu] like"))
        except OctoPipeError as error:
            raise OctoPipeError(f"{where}: [gpu] like: {error}") from None
    needed = ("name", "generation", "bf16_tflops", "memory_gib", "hbm_tb_per_s")
    missing = [name for name in needed if name not in table]
    if missing:
        raise OctoPipeError(f"{where}: [gpu] has no {', '.join(missing)}; give them, or like = a preset")
    return Gpu(
        name="gpu",
        bf16_tflops=_number(table, "bf16_tflops", where),
        memory_gib=_number(table, "memory_gib", where),
        hbm_tb_per_s=_number(table, "hbm_tb_per_s", where),
        intra_gb_per_s=64.0,
        inter_gb_per_s=12.5,
    )


def _links(found: Gpu, network: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The network figures for one GPU."""
    out: dict[str, Any] = {}
    size = found.gpus_per_node
    if "gpus_per_node" in network:
        size = out["gpus_per_node"] = _whole(network, "gpus_per_node", where)
    if "inside_gb_per_s" in network:
        out["intra_gb_per_s"] = _number(network, "inside_gb_per_s", where)
    if "between_gb_per_s" in network and "nic_gb_per_s" in network:
        raise OctoPipeError(f"{where}: [network] has between_gb_per_s and nic_gb_per_s; give one of them")
    if "between_gb_per_s" in network:
        out["inter_gb_per_s"] = _number(network, "between_gb_per_s", where)
    if "nic_gb_per_s" in network:
        nics = _whole(network, "nics_per_node", where) if "nics_per_node" in network else size
        out["inter_gb_per_s"] = _number(network, "nic_gb_per_s", where) * nics / size
    elif "nics_per_node" in network:
        raise OctoPipeError(f"{where}: [network] nics_per_node has no effect without nic_gb_per_s; give both")
    if ("pod_nodes" in network) != ("oversubscription" in network):
        raise OctoPipeError(f"{where}: [network] pod_nodes and oversubscription belong together; give both")
    if "pod_nodes" in network:
        out["pod_gpus"] = _whole(network, "pod_nodes", where) * size
        ratio = _number(network, "oversubscription", where)
        if ratio < 1:
            raise OctoPipeError(f"{where}: [network] oversubscription is {ratio:g}; give 1 or more")
        out["oversubscription"] = ratio
    if "flows_per_connection" in network:
        if "pod_nodes" not in network:
            raise OctoPipeError(f"{where}: [network] flows_per_connection needs pods; give pod_nodes too")
        out["flows"] = _whole(network, "flows_per_connection", where)
    return out


def _known(table: Mapping[str, Any], names: tuple[str, ...], where: str, hint: str) -> None:
    unknown = sorted(str(key) for key in set(table) - set(names))
    if unknown:
        raise OctoPipeError(f"{where}: unknown key {brief(unknown[0])}; {hint}")


def _number(table: Mapping[str, Any], name: str, where: str) -> float:
    value = finite(table[name])
    if value is None or not 1e-6 <= value <= MOST:
        raise OctoPipeError(f"{where}: {name} is {brief(table[name])}; give a number > 0, at most {MOST:g}")
    return value


def _whole(table: Mapping[str, Any], name: str, where: str) -> int:
    value = table[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_GPUS:
        raise OctoPipeError(f"{where}: {name} is {brief(value)}; give a whole number from 1 to {MAX_GPUS}")
    return value


def _word(value: object, where: str) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= 60 or not value.isprintable():
        raise OctoPipeError(f"{where} is {brief(value)}; give up to 60 letters")
    return value
