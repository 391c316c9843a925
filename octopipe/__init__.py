"""OctoPipe: jointly decide which layers form a stage, which rank holds it, and in which order every rank runs its ops.

    import octopipe

    result = octopipe.tune("nemotron-h-8b", 4, 8, tp=2, budget_s=10)
    result.plan.save("plan.json")
    octopipe.simulate("plan.json")

Public names are loaded on first use, so `import octopipe` is cheap, and torch is imported only by names that train.
Adapters to other frameworks are modules: `octopipe.huggingface`, `octopipe.torchtitan`, ...
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from octopipe.base.display import draw_with as _draw_with

if TYPE_CHECKING:
    from octopipe import huggingface as huggingface
    from octopipe import megatron as megatron
    from octopipe import torch_engine as torch_engine
    from octopipe import torchtitan as torchtitan
    from octopipe.api import build_plan, compare, simulate, tune
    from octopipe.base.errors import DeadlockError, DoesNotFitError, NotApplicableError, OctoPipeError, PlanError
    from octopipe.costs.profile_file import Profile, load_profile
    from octopipe.costs.resolve import resolve_costs
    from octopipe.costs.table import CostTable
    from octopipe.models.spec import ModelSpec
    from octopipe.models.zoo import preset
    from octopipe.plans.file import load_plan, save_plan
    from octopipe.plans.plan import Op, Plan, Stage
    from octopipe.runtime.measure.profiler import profile_layers
    from octopipe.runtime.path_losses import PathLosses
    from octopipe.runtime.pipeline import Pipeline
    from octopipe.runtime.precision import MixedPrecisionOptimizer
    from octopipe.runtime.training.adapt import switch
    from octopipe.runtime.training.checkpoint import load_checkpoint, save_checkpoint
    from octopipe.runtime.turns import exchange
    from octopipe.search.comparison import Comparison
    from octopipe.search.tuner import TuneResult
    from octopipe.simulation.lowering import Program, lower
    from octopipe.simulation.timeline import Timeline, load_timeline

__version__ = "0.1.0"

__all__ = [
    "Comparison",
    "CostTable",
    "DeadlockError",
    "DoesNotFitError",
    "MixedPrecisionOptimizer",
    "ModelSpec",
    "NotApplicableError",
    "OctoPipeError",
    "Op",
    "PathLosses",
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
    "exchange",
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
    "octopipe.search.comparison": ("Comparison",),
    "octopipe.costs.table": ("CostTable",),
    "octopipe.base.errors": ("DeadlockError", "DoesNotFitError", "NotApplicableError", "OctoPipeError", "PlanError"),
    "octopipe.simulation.lowering": ("Program", "lower"),
    "octopipe.runtime.measure.profiler": ("profile_layers",),
    "octopipe.models.spec": ("ModelSpec",),
    "octopipe.plans.plan": ("Op", "Plan", "Stage"),
    "octopipe.plans.file": ("load_plan", "save_plan"),
    "octopipe.costs.profile_file": ("Profile", "load_profile"),
    "octopipe.costs.resolve": ("resolve_costs",),
    "octopipe.runtime.path_losses": ("PathLosses",),
    "octopipe.runtime.pipeline": ("Pipeline",),
    "octopipe.runtime.precision": ("MixedPrecisionOptimizer",),
    "octopipe.runtime.turns": ("exchange",),
    "octopipe.simulation.timeline": ("Timeline", "load_timeline"),
    "octopipe.runtime.training.adapt": ("switch",),
    "octopipe.runtime.training.checkpoint": ("load_checkpoint", "save_checkpoint"),
    "octopipe.search.tuner": ("TuneResult",),
    "octopipe.models.zoo": ("preset",),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_ADAPTERS = ("huggingface", "megatron", "torch_engine", "torchtitan")


if not TYPE_CHECKING:  # a checker reads the names above, and reports all others

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
    from octopipe.views.report.notebook import notebook_html

    return notebook_html(what)


_draw_with(_notebook_html)
