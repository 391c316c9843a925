"""The oldest versions of other packages with which the product works, where pip alone may not see to it.

Knows: versions. Does not know: what is done where one is older (`huggingface/source.py` refuses, `doctor` reports).
"""

from __future__ import annotations

OLDEST_TRANSFORMERS = (5, 17)
"""Of every family that the tests know, models of this version and newer ones are what their pieces compute together.
With 5.10 and 5.0, some had other losses."""
