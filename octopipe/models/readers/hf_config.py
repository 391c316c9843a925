"""Any Hugging Face `config.json` of a language model -> ModelSpec, read as plain JSON.

Knows: which reader a model type has, and that an unknown family is read as a usual decoder, with a warning. Does not
know: the keys of a family (`hf_decoder.py`, `hf_classic.py`, `hf_hybrids.py`), towers and encoders (`hf_towers.py`,
`hf_two_towers.py`), transformers (never imported) or weights.

>>> spec = from_config({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,
...                     "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2})
>>> spec.pattern
'ETTTL'
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief, letters, read_json_object, shown, stem_of
from octopipe.models.readers.hf_classic import CLASSICS, classic
from octopipe.models.readers.hf_decoder import Config, Family, decoder
from octopipe.models.readers.hf_families import FAMILIES, OTHERWISE
from octopipe.models.readers.hf_hybrids import HYBRIDS
from octopipe.models.readers.hf_towers import encoder_decoder, towers_of, with_tower
from octopipe.models.readers.hf_two_towers import with_two_towers
from octopipe.models.spec import Layer, ModelSpec


def from_config(
    source: str | Path | Mapping[str, object],
    *,
    name: str | None = None,
    where: str | None = None,
    known_families: bool = False,
) -> ModelSpec:
    """Return the model that a config describes; `source`: a `config.json`, its folder, or the decoded object.

    An unknown family is read as a usual decoder, with a warning. With `known_families` it is an error, for callers that
    can do without the model and prefer an error to a model that may be wrong.
    """
    if isinstance(source, Mapping):
        data, where, name = source, where or "config", name if name is None else letters(name)
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        data, where = read_json_object(path), where or shown(path)
        name = name or (letters(path.parent.name) if path.name == "config.json" else stem_of(path))
    outer = Config(data=data, where=where)
    config = outer.part("text_config") if isinstance(data.get("text_config"), dict) else outer
    kind = str(config.get("model_type") or outer.get("model_type") or "decoder")
    try:
        text_alone = _names_text_model(outer)
        towers = [] if text_alone else towers_of(outer)
        if towers:
            _check_decoder(outer)

            def read_text(text: Config, of: str) -> tuple[Layer, ...]:
                return _read(text, of, of, known_families=known_families).layers

            if len(towers) == 1:
                layers = with_tower(outer, towers[0], read_text)
            else:
                layers = with_two_towers(outer, towers[0], towers[1], read_text)
            return ModelSpec(name=name or str(outer.get("model_type") or kind), layers=layers, norm_eps=_eps(config))
        both = None if text_alone else encoder_decoder(outer)
        if both is not None:
            return ModelSpec(name=name or kind, layers=both, norm_eps=_eps(outer))
        if isinstance(data.get("thinker_config"), Mapping):
            raise OctoPipeError(
                f"{where}: {brief(kind)} is several models, of which one is trained at a time; give its "
                '"thinker_config" as a config.json of its own'
            )
        _refuse_other_parts(data, where)
        _check_decoder(outer)
        return _read(config, kind, name or kind, known_families=known_families)
    except OctoPipeError as error:
        text = str(error)  # the error of a layer does not name the file
        raise OctoPipeError(text if text.startswith(where) else f"{where}: {text}") from None
    except (ArithmeticError, ValueError) as error:
        why = " ".join(str(error).split())[:120]
        raise OctoPipeError(f"{where}: its sizes do not describe a model ({why}); check the sizes") from None


def _read(config: Config, kind: str, name: str, *, known_families: bool) -> ModelSpec:
    if kind in HYBRIDS:
        layers = HYBRIDS[kind](config)
    elif kind in CLASSICS:
        layers = classic(config, CLASSICS[kind])
    else:
        if kind not in FAMILIES:
            _check_usual(config, kind, known_families=known_families)
        layers = decoder(config, FAMILIES.get(kind, Family()))
    return ModelSpec(name=name, layers=layers, norm_eps=_eps(config))


def _eps(config: Config) -> float:
    return config.number("rms_norm_eps", "layer_norm_epsilon", "norm_eps", default=1e-5)


def _names_text_model(config: Config) -> bool:
    """Return whether the config's architecture is only the text model, which is then all that transformers loads."""
    names = [str(item) for item in config.items("architectures") or []]
    return bool(names) and all(name.endswith("ForCausalLM") for name in names)


def _check_usual(config: Config, kind: str, *, known_families: bool) -> None:
    """Warn, once per file, that a family is unknown and is read as a usual decoder.

    Raise an error instead if the family is known to differ from it, or if `known_families` is set.
    """
    alien = [brief(key) for key in sorted(map(str, config.data)) if key.startswith(("mamba_", "ssm_", "rwkv"))]
    why = OTHERWISE.get(kind) or (alien[0] if alien else None)
    if why is not None:
        raise OctoPipeError(
            f"{config.where}: model type {brief(kind)} has layers this reader does not know ({why}); "
            "`octopipe profile` measures the model itself where transformers is installed"
        )
    if known_families:
        raise OctoPipeError(
            f"{config.where}: model type {brief(kind)} is not known here; `octopipe profile` measures it"
        )
    if kind != "decoder":
        _warn(config.where, kind)


@cache
def _warn(where: str, kind: str) -> None:
    """Log the warning, once for each file."""
    log.warning(
        "%s: model type %s is not known here: read as a usual decoder with a gated MLP, which it may not be; "
        "`octopipe profile` measures the model itself",
        where,
        brief(kind),
    )


log = logging.getLogger("octopipe.readers")
TOWERS = ("vision", "visual", "image", "video", "audio", "speech", "qformer", "perceiver", "vq_", "encoder_config")
"""The beginnings of keys whose values describe another part than the decoder (for LLaVA's own keys: after `mm_`)."""
ENCODERS = frozenset(
    """
    albert bart bert bigbird_pegasus blenderbot blenderbot-small camembert canine clip convbert data2vec-text
    deberta deberta-v2 dinov2 distilbert electra ernie esm flaubert fnet funnel hubert ibert layoutlm
    layoutlmv2 layoutlmv3 led longformer longt5 luke m2m_100 marian mbart megatron-bert mobilebert modernbert
    mpnet mt5 mvp nezha nllb-moe nomic_bert nystromformer pegasus pegasus_x plbart prophetnet qdqbert rembert
    roberta roberta-prelayernorm roc_bert roformer seamless_m4t siglip speech_to_text speecht5 squeezebert
    switch_transformers t5 tapas trocr udop umt5 vit wav2vec2 whisper xlm-prophetnet xlm-roberta
    xlm-roberta-xl xmod yoso
    """.split()  # noqa: SIM905
)
"""Model types whose usual models are encoders or encoder-decoders."""


def _refuse_other_parts(data: Mapping[str, object], where: str) -> None:
    """Raise an error if a config describes parts that are not read, so that no plan silently leaves them out."""
    for key, value in data.items():
        name = str(key).removeprefix("mm_")
        tower = isinstance(value, dict) or (isinstance(value, str) and str(key).startswith("mm_"))
        if tower and value and name.startswith(TOWERS):
            raise OctoPipeError(
                f'{where}: "{key}" is a part beside the decoder that cannot be read from a config; `octopipe profile` '
                "measures the model itself, and its profile is a MODEL; or give the config of the text model alone"
            )


def _check_decoder(config: Config) -> None:
    kind = str(config.get("model_type"))
    if kind in ENCODERS:
        raise OctoPipeError(f"{config.where}: {kind} is an encoder (or has one); give the config of a causal LM")
    names = [str(item) for item in config.items("architectures") or []]
    good = ("CausalLM", "LMHead", "ConditionalGeneration")
    if config.flag("is_encoder_decoder") or (names and not any(g in n for n in names for g in good)):
        shown_name = brief(names[0]) if names else "an encoder-decoder"
        raise OctoPipeError(f"{config.where}: {shown_name} is not a decoder; give the config of a causal LM")
