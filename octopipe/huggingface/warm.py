"""What every rank of a Hugging Face model loads before its first step, loaded once by the server ranks are forked from.

Knows: what of transformers is slow to load. Does not know: any model.
"""

from __future__ import annotations

import transformers.masking_utils
import transformers.modeling_utils
import transformers.models.auto.modeling_auto  # noqa: F401

import octopipe.huggingface.cut  # noqa: F401
