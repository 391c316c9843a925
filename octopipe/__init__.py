"""OctoPipe: decide together which layers form a stage, which rank holds it and in which order ranks work.

    import octopipe

    result = octopipe.tune("nemotron-h-8b", 4, 8, tp=2, budget_s=10)
    result.plan.save("plan.json")
    octopipe.simulate("plan.json")

Public names load on first use, so that `import octopipe` costs nothing and torch is never imported unless a name
that trains is asked for. Adapters to other frameworks are modules: `octopipe.huggingface`, `octopipe.torchtitan`, ...
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from octopipe.display import draw_with as _draw_with

if TYPE_CHECKING:
    from octopipe.api import build_plan, compare, simulate, tune
    from octopipe.comparison import Comparison
    from octopipe.cost import CostTable
    from octopipe.errors import DeadlockError, DoesNotFitError, NotApplicableError, OctoPipeError, PlanError
    from octopipe.lowering import Program, lower
    from octopipe.measure.profiler import profile_layers
    from octopipe.model import ModelSpec
    from octopipe.plan import Op, Plan, Stage
    from octopipe.plan_file import load_plan, save_plan
    from octopipe.profile_file import Profile, load_profile
    from octopipe.resolve import resolve_costs
    from octopipe.runtime.pipeline import Pipeline
    from octopipe.timeline import Timeline, load_timeline
    from octopipe.training.adapt import switch
    from octopipe.training.checkpoint import load_checkpoint, save_checkpoint
    from octopipe.tuner import TuneResult
    from octopipe.zoo import preset

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "CostTable",
    "DeadlockError",
    "DoesNotFitError",
    "ModelSpec",
    "NotApplicableError",
    "OctoPipeError",
    "Op",
    "Pipeline",
    "Plan",
    "PlanError",
    "Profile",
    "Program",
    "Stage",
    "Timeline",
    "TuneResult",
    "__version__",
    "build_plan",
    "compare",
    "load_checkpoint",
    "load_plan",
    "load_profile",
    "load_timeline",
    "lower",
    "preset",
    "profile_layers",
    "resolve_costs",
    "save_checkpoint",
    "save_plan",
    "simulate",
    "switch",
    "tune",
]

_HOME = {
    "octopipe.api": ("build_plan", "compare", "simulate", "tune"),
    "octopipe.comparison": ("Comparison",),
    "octopipe.cost": ("CostTable",),
    "octopipe.errors": ("DeadlockError", "DoesNotFitError", "NotApplicableError", "OctoPipeError", "PlanError"),
    "octopipe.lowering": ("Program", "lower"),
    "octopipe.measure.profiler": ("profile_layers",),
    "octopipe.model": ("ModelSpec",),
    "octopipe.plan": ("Op", "Plan", "Stage"),
    "octopipe.plan_file": ("load_plan", "save_plan"),
    "octopipe.profile_file": ("Profile", "load_profile"),
    "octopipe.resolve": ("resolve_costs",),
    "octopipe.runtime.pipeline": ("Pipeline",),
    "octopipe.timeline": ("Timeline", "load_timeline"),
    "octopipe.training.adapt": ("switch",),
    "octopipe.training.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "octopipe.tuner": ("TuneResult",),
    "octopipe.zoo": ("preset",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_ADAPTERS = ("huggingface", "megatron", "torch_engine", "torchtitan")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        try:
            module = importlib.import_module(_MODULE_OF[name])
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] != "torch":
                raise
            message = f'octopipe.{name} needs torch; install it: pip install "octopipe[torch]"'
            raise ModuleNotFoundError(message, name="torch") from None
        globals()[name] = value = getattr(module, name)
        return value
    if name in _ADAPTERS and importlib.util.find_spec(f"octopipe.{name}") is not None:
        return importlib.import_module(f"octopipe.{name}")
    raise AttributeError(f"module 'octopipe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _notebook_html(what: object) -> str | None:
    from octopipe.report.notebook import notebook_html

    return notebook_html(what)


_draw_with(_notebook_html)
