"""Weights of multi-token-prediction layers in a model's folder: read and written together with the main model's.

Knows: under which names families store them (DeepSeek-V3 and GLM-4.5 as layers behind the last one, others under
`mtp.`), and that transformers converts these names (`MtpModel.get_weight_conversions`). Does not know: how pieces are
filled (`weights.py`), or how a checkpoint of ours is read (runtime/training/convert.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octopipe.huggingface.predictions import WithPredictions
from octopipe.huggingface.weights import Store, first_names

MAIN, MORE = "main.", "predictions."
ONE_LEVEL_UP = {
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm",
}  # fmt: skip
"""Parts of a single prediction layer that are stored directly under `mtp.`, with their names (Qwen3-Next, Mellum)."""


class PredictionStore:
    """A folder of safetensors that is read by the parameter names of a model with its predictions."""

    def __init__(self, model: WithPredictions, folder: Path):
        predictions: Any = model.predictions
        self._main = Store(model.main, folder)
        self.where = self._main.where
        mine = _keys_of_predictions(model)
        mapping = predictions.get_weight_conversions(model.main)
        self._more = Store(model.predictions, folder, mapping=mapping, wanted=lambda key: mine.search(key) is not None)
        own = {name for name in first_names(model).values() if name.startswith(MORE)}
        self.absent = frozenset(name for name in own if not self._more.holds(name.removeprefix(MORE)))
        """Parameters of the predictions that the folder does not contain, so that they are initialised at random."""

    def read(self, names: set[str]) -> dict[str, Tensor]:
        """The values of those parameters and buffers that the folder contains."""
        out = {}
        for prefix, store in ((MAIN, self._main), (MORE, self._more)):
            found = store.read({name.removeprefix(prefix) for name in names if name.startswith(prefix)})
            out.update({f"{prefix}{name}": value for name, value in found.items()})
        return out


def _keys_of_predictions(model: WithPredictions) -> re.Pattern[str]:
    """The keys of a folder that belong to the predictions."""
    first = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    numbers = "|".join(str(first + k) for k in range(model.depth))
    return re.compile(rf"(^|\.)layers\.({numbers})\.|(^|\.)mtp\.")


def save_with_predictions(model: WithPredictions, target: Path, **options: Any) -> None:
    """Write main model and predictions into one folder, from which `from_pretrained` reads the main model."""
    main: Any = model.main
    state = {**main.state_dict(), **dict(_as_stored(model))}
    main.save_pretrained(target, state_dict=state, **options)


def _as_stored(model: WithPredictions) -> Iterator[tuple[str, Tensor]]:
    """The predictions' tensors under the family's names, in the form that `save_pretrained` expects."""
    main: Any = model.main
    patterns = " ".join(main._keys_to_ignore_on_load_unexpected or ())
    under = r"model\.mtp" in patterns, "mtp" in patterns
    if any(under):
        path, first, norm = f"{'model.' * under[0]}mtp.layers", 0, "post_norm"
    else:
        path = next(name for name, module in main.named_modules() if module is main.get_decoder().layers)
        first, norm = int(model.config.get_text_config(decoder=True).num_hidden_layers), "shared_head.norm"
    layers: Any = model.predictions.layers
    for k, layer in enumerate(layers):
        for name, value in layer.state_dict().items():
            part, _, rest = name.partition(".")
            if under == (False, True) and len(layers) == 1 and part in ONE_LEVEL_UP:
                yield f"mtp.{ONE_LEVEL_UP[part]}.{rest}", value
                continue
            name = name.removeprefix("mtp_block.").replace("post_norm.", f"{norm}.")
            yield f"{path}.{first + k}.{name}", value
        if not any(under):  # DeepSeek-V3's folder repeats the main model's embedding and head in each of these layers
            for name, module in (("embed_tokens", main.get_input_embeddings()), ("shared_head.head", main.lm_head)):
                yield f"{path}.{first + k}.{name}.weight", _copy(module)
    shared = getattr(model.predictions, "shared_post_norm", None)
    for name, value in () if shared is None else shared.state_dict().items():
        yield f"{path.removesuffix('.layers')}.shared_post_norm.{name}", value


def _copy(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    return weight.detach().clone()
