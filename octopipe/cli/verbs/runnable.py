"""The model that `train` and `profile` run: a preset in our own layers, or a Hugging Face model in its own code.

Knows: which of the two MODEL refers to, and how both are scaled down. Does not know: how they run.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octopipe.base.errors import OctoPipeError
from octopipe.costs.mode import OLDER_NAMES, PRECISIONS

if TYPE_CHECKING:
    from octopipe.huggingface.described import HfModel
    from octopipe.models.spec import ModelSpec

OWN_LAYERS = "octopipe's own layers"
"""What `code_words` says of them."""


def model_of(
    name: str,
    *,
    scale: float | None = None,
    num_layers: int | None = None,
    own: bool = False,
    kernels: tuple[str, ...] = (),
    device: str = "cpu",
    images: tuple[float, ...] = (),
    recordings: tuple[float, ...] = (),
    encoder_seq: int | None = None,
    seq: int = 0,
    mtp: float | None = None,
) -> ModelSpec | HfModel:
    """Return the model behind MODEL, scaled and with the kernels as the flags say. `images`, `recordings` and
    `encoder_seq`: the input of its encoder, if it has one, beside sequences of `seq` tokens. `mtp`: the weight of the
    loss of its multi-token prediction, if that is trained."""
    from octopipe.costs.resolve import resolve_spec
    from octopipe.models.spec import Mtp
    from octopipe.models.tower_presets import CONFIGS
    from octopipe.models.zoo import PRESETS

    scaled = scale is not None and scale != 1.0
    if name in CONFIGS or (name not in PRESETS and not own and is_hf_config(name)):
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
        about = CONFIGS.get(name)
        found = describe(
            name if about is None else about[1],
            num_layers=num_layers,
            attention=attention,
            liger=liger,
            images=images,
            recordings=recordings,
            encoder_seq=encoder_seq,
            seq=seq,
            name=name if about is not None else "",
            predictions=mtp,
        )
        if found.untrained_predictions:
            _report_untrained_layers(name, found.untrained_predictions, "--mtp, which trains them, is not given")
        if found.fresh_predictions:
            _report_fresh_weights(name, found.fresh_predictions)
        return found
    if mtp is not None:
        raise OctoPipeError("--mtp is for transformers' models: octopipe's own layers predict one token; leave it out")
    if images or recordings or encoder_seq is not None:
        raise OctoPipeError(f"{name} has no tower and no encoder; leave --images, --recordings and --encoder-seq out")
    if own and name in PRESETS:
        raise OctoPipeError(f"{name} is a preset and always runs in octopipe's own layers; leave --own-layers out")
    spec = resolve_spec(name)
    if spec is None:
        raise OctoPipeError(f"{name} contains times, not layers; give a preset or a Hugging Face config.json")
    if spec.source is not None:
        raise OctoPipeError(f"{name}: octopipe's own layers are decoders only; leave --own-layers out")
    if "liger" in kernels:
        raise OctoPipeError("--kernels liger is for transformers' models; give a config.json, or leave it out")
    if count := sum(isinstance(layer, Mtp) for layer in spec):
        spec = spec.without_mtp()
        _report_untrained_layers(name, count, "octopipe's own layers have none")
    if scaled or num_layers is not None:
        spec = spec.scaled(1.0 if scale is None else scale, num_layers=num_layers)
    return spec


def _report_untrained_layers(name: str, count: int, why: str) -> None:
    """Print on stderr, whatever the output format, that the model's prediction layers are left out."""
    from octopipe.cli.verbs.common import console, named
    from octopipe.cli.verbs.text import counted

    layers = counted(count, "multi-token-prediction layer")
    text = f"{name} has {layers}, and {why}: the main model alone is trained or measured"
    console(stderr=True).print(named(text), style="yellow", soft_wrap=True)


def _report_fresh_weights(name: str, count: int) -> None:
    """Print that parameters of the prediction layers are newly initialised, since no weights were found."""
    from octopipe.cli.verbs.common import console, named
    from octopipe.cli.verbs.text import counted

    what = f"{counted(count, 'parameter')} of its prediction layers"
    text = f"{name} has no weights for {what}: they are initialised randomly"
    console(stderr=True).print(named(text), style="yellow", soft_wrap=True)


def add_encoder_arguments(group: Any, *, seq_default: str) -> None:
    """Add the flags for an encoder's input, frozen layers, and training of multi-token prediction."""
    from octopipe.cli.verbs.flags import non_negative, of_kind, whole_number
    from octopipe.costs.cluster.fields import LayerRanges
    from octopipe.costs.cluster.item_counts import ItemCounts

    group.add_argument(
        "--images",
        type=of_kind(ItemCounts()),
        metavar="N|FILE",
        help="models with a tower: images per sequence, one number or one for each sequence of a pipeline's step "
        "(default: 1)",
    )
    group.add_argument(
        "--recordings",
        type=of_kind(ItemCounts()),
        metavar="N|FILE",
        help="models with an audio tower: recordings per sequence, in the form of --images (with one tower, the same "
        "as --images)",
    )
    group.add_argument(
        "--mtp",
        type=non_negative,
        nargs="?",
        const=0.3,
        metavar="WEIGHT",
        help="transformers' models with multi-token-prediction layers: train them too, with this weight of their loss "
        "(default: they are left out; without a number: 0.3)",
    )
    group.add_argument(
        "--encoder-seq",
        type=whole_number,
        metavar="N",
        help=f"models with an encoder: positions per image of any size, or tokens per source text ({seq_default})",
    )
    group.add_argument(
        "--frozen",
        "--freeze",
        type=of_kind(LayerRanges()),
        metavar="LAYERS",
        help="layers whose weights are not trained, counted from 0, e.g. 0-15,33, or `towers`",
    )


def frozen_layers(model: ModelSpec | HfModel, text: Any) -> tuple[int, ...]:
    """Return the numbers of the layers that --frozen names."""
    from octopipe.costs.analytic.frozen import layer_states
    from octopipe.costs.cluster.fields import TOWERS, LayerRanges

    ranges = () if not text else LayerRanges().read("--frozen", text)
    form = getattr(model, "inputs", None)
    towers = 0 if form is None else form.num_tower_layers
    if TOWERS in ranges:
        if not towers:
            raise OctoPipeError(f"{model.name} has no tower and no encoder to freeze; name layers, as in 0-15")
        ranges = tuple(sorted({*(pair for pair in ranges if pair != TOWERS), (0, towers - 1)}))
    states = layer_states(model.num_layers, ranges)
    frozen = tuple(k for k, state in enumerate(states) if state != "trained")
    _refuse_half_frozen(model, frozen)
    return frozen


def _refuse_half_frozen(model: ModelSpec | HfModel, frozen: tuple[int, ...]) -> None:
    """Raise if layers that share weights are frozen in part, as far as it is known here which do: of transformers
    models without a tower, an encoder or prediction layers, ranks find it when they have built the layers."""
    from octopipe.models.spec import Embedding, Head, ModelSpec

    if isinstance(model, ModelSpec):
        last = model.layers[-1]
        tied = [k for k, layer in enumerate(model.layers) if isinstance(layer, Embedding)]
        ties = [(*tied, model.num_layers - 1)] if isinstance(last, Head) and last.tied else []
    else:
        ties = [layers for layers, _ in model.shared]
    for layers in ties:
        still, left = ([k for k in layers if (k in frozen) is flag] for flag in (True, False))
        if still and left:
            raise OctoPipeError(
                f"layer {still[0]} is tied to layer {left[0]} (--frozen names only the first): freeze both, or neither"
            )


def add_precision_arguments(group: Any) -> None:
    """Add `--precision`, and the older `--dtype`."""
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="default: bf16-main-fp32 on cuda (bfloat16 layers, float32 gradients and master weights), fp32 on cpu",
    )
    group.add_argument("--dtype", choices=tuple(OLDER_NAMES), help="former name of --precision")


def add_kernel_arguments(group: Any) -> None:
    """Add `--kernels` and `--compile-scans`."""
    group.add_argument(
        "--kernels",
        type=kernel_words,
        default=(),
        metavar="LIST",
        help="kernels to use instead of the fastest installed ones: mamba_ssm, fla, flash_attn, liger, compiled, sdpa, "
        "eager, fused, lean, chunked",
    )
    group.add_argument(
        "--compile-scans",
        action=argparse.BooleanOptionalAction,
        help="compile Mamba-2's scan with torch.compile (default: on cuda)",
    )


def kernel_words(text: str) -> tuple[str, ...]:
    """Parse names of kernels separated by commas (an argparse type).

    >>> kernel_words("flash-attn, liger")
    ('flash_attn', 'liger')
    """
    return tuple(word.strip().lower().replace("-", "_") for word in text.split(",") if word.strip())


def is_hf_config(name: str) -> bool:
    """Whether a path is a Hugging Face config: JSON with none of the keys of our own formats."""
    from pathlib import Path

    from octopipe.base.files import read_json_object

    path = Path(name)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            return False
        file = read_json_object(path)
    except (OSError, ValueError, OctoPipeError):
        return False  # the code that needs the file reports what is wrong with it
    ours = "format" in file or "pattern" in file or "forward_ms" in file
    return not ours and any(key in file for key in ("model_type", "architectures"))


def code_words(model: ModelSpec | HfModel) -> str:
    """Return words on whose implementation of the layers runs."""
    from octopipe.models.spec import ModelSpec

    return OWN_LAYERS if isinstance(model, ModelSpec) else model.code_words()


@contextmanager
def needs_torch() -> Iterator[None]:
    """Turn a failed import of torch inside the block into a one-line error."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch":
            raise
        raise OctoPipeError(f'this needs PyTorch ({error}); pip install "octopipe[torch]"') from None


def settings_of(spec: Any) -> dict[str, Any]:
    """Return what determines the computation of layers besides their number of parameters (heads, windows,
    experts per token), as a profile records it. Empty for octopipe's own layers, which a recipe's flags determine."""
    settings = getattr(spec, "settings", None)
    return {} if settings is None else dict(settings())
