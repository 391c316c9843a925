"""Tests of what only newer versions of transformers have.

Knows: the version that is installed, and families that it may lack. Does not know: any test. `pyproject.toml` names the
oldest version that is supported; CI runs the tests with that one and with the newest.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version

VERSION = Version(Version(transformers.__version__).base_version)


def since(version: str) -> pytest.MarkDecorator:
    """A mark: the test needs this version or a newer one."""
    return pytest.mark.skipif(Version(version) > VERSION, reason=f"needs transformers {version}")


def config_class(family: str) -> Any:
    """The class of a family's config; the test is skipped where the family is unknown."""
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return transformers.CONFIG_MAPPING[family]
