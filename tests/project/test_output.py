"""What a run of the tests shows: our own use of something deprecated is an error, known warnings of others are silent,
and what ranks print is shown where they fail."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest


def give(text: str, kind: type[Warning], module: str) -> None:
    warnings.warn_explicit(text, kind, f"{module}.py", 1, module=module)


@pytest.mark.parametrize("kind", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_what_is_deprecated_and_used_by_the_package_is_an_error(kind: type[Warning]) -> None:
    with pytest.raises(kind, match="old"):
        give("old", kind, "octopipe.runtime.pipeline")


def test_warnings_of_others_are_known_by_name() -> None:
    with warnings.catch_warnings(record=True) as heard:
        give("old", DeprecationWarning, "torch.jit")
        give("mkldnn_matmul failed, switching to BLAS gemm: no bf16", UserWarning, "octopipe.runtime.stages.wgrad")
        give("new", UserWarning, "octopipe.runtime.pipeline")
    assert [str(w.message) for w in heard] == ["new"]


def prints_and_fails(world: Any) -> None:
    os.write(2, b"a line of rank %d\n" % world.rank)
    warnings.warn_explicit("old", DeprecationWarning, "x.py", 1, module="octopipe.x")


def test_ranks_fail_with_what_they_printed_and_hear_of_deprecation(two: Any) -> None:
    with pytest.raises(AssertionError) as caught:
        two.run(prints_and_fails)
    text = str(caught.value)
    for rank in (0, 1):
        assert f"rank {rank}: DeprecationWarning: old" in text and f"rank {rank} printed: a line of rank {rank}" in text
