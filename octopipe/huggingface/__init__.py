"""Splits language models of Hugging Face transformers into layers that `octopipe.Pipeline` runs.

Knows: transformers (imported when it is used). Does not know: model families by name; a model is split according to
what its own forward does.
"""

from octopipe.huggingface.cut import LayerList, layers
from octopipe.huggingface.labels import CausalLoss, micro_batches
from octopipe.huggingface.towers import VisionLanguage, vision_language

__all__ = ["CausalLoss", "LayerList", "VisionLanguage", "layers", "micro_batches", "vision_language"]
