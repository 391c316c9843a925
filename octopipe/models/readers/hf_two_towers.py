"""Configs of models with a vision tower and an audio tower -> the layers of a ModelSpec.

Knows: the thinkers of Qwen2.5-Omni and Qwen3-Omni, which run the audio tower first: its convolutions, its blocks, and
how many tokens half a minute of sound becomes. Does not know: the keys that all towers share (`hf_towers.py`), or the
text model's own (`hf_decoder.py`).

The two towers are one chain of layers, as `octopipe.huggingface.layers` divides the model: its pieces hand everything
that later pieces need from one to the next. So the patches of images pass the audio tower, and what the audio tower
gives passes the vision tower, until the layer at which both join the tokens takes them.
"""

from __future__ import annotations

from dataclasses import replace

from octopipe.base.errors import OctoPipeError
from octopipe.base.files import brief
from octopipe.models.readers.hf_decoder import Config
from octopipe.models.readers.hf_towers import (
    Text,
    images_of,
    pixels_of,
    projector_of,
    text_of,
    tower_blocks,
    width_of,
    with_late_features,
)
from octopipe.models.spec import Attention, Block, Embedding, Layer
from octopipe.models.towers import Carried, Join, Projection, Projector, Source, Stem, TowerLayer

QWEN2, QWEN3 = "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"


def with_two_towers(config: Config, vision: Config, sound: Config, read_text: Text) -> tuple[Layer, ...]:
    """Return the layers of an audio tower, of a vision tower, the layer that joins both outputs, and the decoder's."""
    kind = str(config.get("model_type"))
    if kind not in (QWEN2, QWEN3):
        raise OctoPipeError(
            f"{config.where}: vision_config and audio_config are two towers, which can be read for {QWEN2} and "
            f"{QWEN3}, not for {brief(kind)}; `octopipe profile` measures the model with its images"
        )
    text, family = text_of(config)
    # The whole model says whether its head is tied; what its text part says does not count.
    tied = {"tie_word_embeddings": config.flag("tie_word_embeddings")}
    embedding, *blocks, head = read_text(Config(data={**text.data, **tied}, where=text.where), family)
    assert isinstance(embedding, Embedding)
    images, recordings = images_of(config, vision), _recordings(sound, kind)
    pixels = (Carried(source=images, width=pixels_of(vision)),)
    heard = (Carried(source=recordings, width=width_of(sound)),)
    audio = (_stem(sound, kind), *_sound_blocks(sound, kind, recordings))
    seen = (_patches(vision, kind), *tower_blocks(vision, kind.replace("_thinker", "_vision")))
    projector = projector_of(config, vision, embedding.hidden)
    width = width_of(sound)
    voice = Projector(hidden=embedding.hidden, width=width, ffn=width if kind == QWEN3 else 0)
    join = Join(
        hidden=embedding.hidden,
        embedding=embedding,
        projectors=(projector,),
        source=images,
        others=((voice, recordings),),
    )
    return (
        *(TowerLayer(inner=layer, source=recordings, beside=pixels) for layer in audio),
        *(TowerLayer(inner=layer, source=images, beside=heard) for layer in seen),
        join,
        *with_late_features(vision, projector, images, blocks),
        head,
    )


def _patches(vision: Config, kind: str) -> Layer:
    learned = vision.size("num_position_embeddings", default=0)
    return Projection(hidden=width_of(vision), width=pixels_of(vision), bias=kind == QWEN3, positions=learned)


def _recordings(sound: Config, kind: str) -> Source:
    """Return the longest recordings: two frames per position that the config states, cut into chunks of which each
    becomes a number of positions of its own."""
    frames, chunk = 2 * sound.size("max_source_positions", default=1500), _chunk(sound, kind)
    positions = frames // chunk * _shortened(chunk, kind) + _shortened(frames % chunk, kind)
    tokens = positions if kind == QWEN3 else positions // 2  # the other one joins neighbours behind its tower
    return Source(kind="audio", positions=max(1, positions), tokens=max(1, tokens))


def _chunk(sound: Config, kind: str) -> int:
    return 2 * max(1, sound.size("n_window", default=50 if kind == QWEN3 else 100))


def _shortened(frames: int, kind: str) -> int:
    """Return the positions that frames become in the convolutions, which halve their number three times or once."""
    for _ in range(3 if kind == QWEN3 else 1):
        frames = (frames + 1) // 2
    return frames


def _stem(sound: Config, kind: str) -> Layer:
    width, bins = width_of(sound), sound.size("num_mel_bins", default=128)
    if kind == QWEN2:
        ends = 2 * sound.size("output_dim", default=3584)  # two embeddings, for the beginning and end of a recording
        return Stem(hidden=width, products=((3 * bins, width, 2), (3 * width, width, 1)), more=ends)
    inner = sound.size("downsample_hidden_size", default=480)
    halves = [bins]
    for _ in range(3):
        halves.append((halves[-1] + 1) // 2)
    # Every convolution halves bins and frames, so the first runs at four times as many frames as the last.
    steps = [(9 * (inner if k else 1), inner, float(halves[k + 1] * 2 ** (2 - k))) for k in range(3)]
    return Stem(hidden=width, products=(*steps, (inner * halves[3], width, 1.0)), last_bias=False)


def _sound_blocks(sound: Config, kind: str, recordings: Source) -> list[Block]:
    """Return the blocks of the audio tower, whose positions attend to those of their window."""
    if kind == QWEN3:
        chunk = _chunk(sound, kind)
        window = max(1, sound.size("n_window_infer", default=800) // chunk) * _shortened(chunk, kind)
    else:
        window = _shortened(_chunk(sound, kind), kind)
    out = []
    for block in tower_blocks(sound, kind):
        mixer = block.mixer
        assert isinstance(mixer, Attention)
        narrow = window if window < recordings.positions else None
        out.append(replace(block, mixer=replace(mixer, window=narrow)))
    return out
