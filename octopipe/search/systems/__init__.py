"""Published pipeline systems as policies: (costs, ranks, micro-batches) -> Plan. One file per system."""

from octopipe.search.systems.registry import Setting, System, build_plan, get_system, require, system, systems

__all__ = ["Setting", "System", "build_plan", "get_system", "require", "system", "systems"]
