"""Whether documents packed into one sample can be masked from each other in a transformers model.

Knows: that a family's own masks separate documents when positions restart (`position_ids`), and for which layers no
mask can do so. Does not know: data or training.

The check inspects the masks that the model's own forward passes to its layers for two packed documents.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.cut import LayerList
from octopipe.huggingface.prediction_cut import PredictionCut
from octopipe.huggingface.section_cut import SectionCut

_HALF = 11
"""The length of each of the two documents of the check. Twice this number is no usual width of a head."""
_STATE = re.compile("Mamba|SSM|Recurrent|Rwkv|DeltaNet|LinearAttention|LightningAttention|Retention|ShortConv")


def cannot_keep_apart(parts: LayerList) -> str:
    """The reason why documents of one sample would attend to each other; "" if they do not."""
    cut = parts._cut
    if isinstance(cut, PredictionCut):
        return "its prediction layers take no positions (--mtp)"
    if isinstance(cut, SectionCut):
        return "its layers take more than a mask and positions (a model that is cut in sections)"
    blocks = list(cut.model.get_submodule(cut.anatomy.path).children())
    for k, block in enumerate(blocks):
        carrier = next(
            (m for m in block.modules() if isinstance(m, nn.Conv1d) or _STATE.search(type(m).__name__)), None
        )
        if carrier is not None:
            return f"layer {k + 1} ({type(carrier).__name__}) carries a state from document to document"
    positions = torch.arange(_HALF).repeat(2)[None]
    width = next((p.shape[-1] for p in cut.model.get_input_embeddings().parameters()), 1)  # type: ignore[operator]
    shape = [1, 2 * _HALF, width] if cut.anatomy.batch_dim == 0 else [2 * _HALF, 1, width]
    flash = "flash" in str(getattr(parts.config, "_attn_implementation", ""))
    dtype = next((p.dtype for p in cut.model.parameters() if p.is_floating_point()), torch.float32)
    for k in range(len(blocks)):
        try:
            leaves, _, _ = cut.recorder.arguments(
                k, torch.zeros(shape, dtype=dtype), dtype, {"position_ids": positions}
            )
        except (OctoPipeError, RuntimeError, TypeError, ValueError) as error:
            return f"its forward takes no positions ({' '.join(str(error).split())[:80]})"
        told = any(isinstance(x, Tensor) and x.shape == positions.shape and torch.equal(x, positions) for x in leaves)
        masks = [x for x in leaves if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-2:] == (2 * _HALF,) * 2]
        if not (masks and all(map(_blocks, masks))) and not (flash and told):
            return f"the mask of layer {k + 1} does not tell documents apart"
    return ""


def _blocks(mask: Any) -> bool:
    """Whether a mask prevents tokens of the second document from attending to the first one, but not to each other."""
    seen = mask if mask.dtype is torch.bool else mask > -1e4
    return not bool(seen[..., _HALF:, :_HALF].any()) and bool(seen[..., _HALF:, _HALF:].any())
