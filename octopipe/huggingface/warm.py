"""Modules that every rank of a Hugging Face model needs, loaded once by the server that ranks are forked from.

Knows: which parts of transformers are slow to load. Does not know: any model.
"""

from __future__ import annotations

import transformers.masking_utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto  # noqa: F401

import octopipe.huggingface.cut  # noqa: F401
