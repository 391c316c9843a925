"""The model that `train` and `profile` run: a preset in our own layers, or a Hugging Face model in its own code.

Knows: which of the two MODEL refers to, and how both are scaled down. Does not know: how they run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import OLDER_NAMES, PRECISIONS

if TYPE_CHECKING:
    from octopipe.huggingface.described import HfModel
    from octopipe.models.spec import ModelSpec


def model_of(
    name: str,
    *,
    scale: float | None = None,
    num_layers: int | None = None,
    own: bool = False,
    kernels: tuple[str, ...] = (),
    device: str = "cpu",
) -> ModelSpec | HfModel:
    """The model behind MODEL, made smaller as the flags say, with the kernels they ask for."""
    from octopipe.costs.resolve import resolve_spec
    from octopipe.models.spec import Mtp
    from octopipe.models.zoo import PRESETS

    scaled = scale is not None and scale != 1.0
    if name not in PRESETS and not own and is_hf_config(name):
        if scaled:
            raise OctoPipeError(
                f"{name}: --scale applies to octopipe's own layers, not to a transformers model; write a smaller "
                "config.json, use --layers, or add --own-layers"
            )
        with needs_torch():
            from octopipe.huggingface.described import describe
            from octopipe.huggingface.liger import WORDS, choice
            from octopipe.runtime.nn.kernels import require
        require(kernels, device, WORDS)
        attention, liger = choice(kernels)
        return describe(name, num_layers=num_layers, attention=attention, liger=liger)
    if own and name in PRESETS:
        raise OctoPipeError(f"{name} is a preset and always runs in octopipe's own layers; leave --own-layers out")
    spec = resolve_spec(name)
    if spec is None:
        raise OctoPipeError(f"{name} contains times, not layers; give a preset or a Hugging Face config.json")
    if "liger" in kernels:
        raise OctoPipeError("--kernels liger is for transformers' models; give a config.json, or leave it out")
    if any(isinstance(layer, Mtp) for layer in spec):
        spec = spec.without_mtp()
    if scaled or num_layers is not None:
        spec = spec.scaled(1.0 if scale is None else scale, num_layers=num_layers)
    return spec


def add_precision_arguments(group: Any) -> None:
    """`--precision`, and the older `--dtype`."""
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="default: bf16-main-fp32 on cuda (bfloat16 layers, float32 gradients and master weights), fp32 on cpu",
    )
    group.add_argument("--dtype", choices=tuple(OLDER_NAMES), help="former name of --precision")


def kernel_words(text: str) -> tuple[str, ...]:
    """An argparse type: names of kernels separated by commas.

    >>> kernel_words("flash-attn, liger")
    ('flash_attn', 'liger')
    """
    return tuple(word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip())


def is_hf_config(name: str) -> bool:
    """Whether a path holds a Hugging Face config: JSON with none of the keys of our own files."""
    from pathlib import Path

    from octopipe.base.files import read_json_object

    path = Path(name)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            return False
        file = read_json_object(path)
    except (OSError, ValueError, OctoPipeError):
        return False  # whoever reads it for good says what is wrong with it
    ours = "format" in file or "pattern" in file or "forward_ms" in file
    return not ours and any(key in file for key in ("model_type", "architectures"))


def told(model: ModelSpec | HfModel) -> str:
    """Whose layers run."""
    from octopipe.models.spec import ModelSpec

    return "octopipe's own layers" if isinstance(model, ModelSpec) else model.told()


@contextmanager
def needs_torch() -> Iterator[None]:
    """Around imports: a missing torch is one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise OctoPipeError(f'this needs PyTorch ({error}); pip install "octopipe[torch]"') from None
