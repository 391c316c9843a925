"""Multi-token prediction: a causal language model of transformers together with its prediction layers, for training.

Knows: how prediction layers are made, how the main model's last hidden state passes through them, one after the other,
and which tokens each of them predicts. Does not know: how the main model is split (`cut.py`), or which piece holds
which parameters (`prediction_cut.py`).

The layers are transformers' own (`MtpLayer`), which builds them for generation alone. Layer k, counted from 1, takes
the hidden state of position i and the embedding of token i + k, and predicts token i + k + 1 with the main model's
head, as in DeepSeek-V3 (arXiv 2412.19437, section 2.2). Hidden states are those that transformers gives them: behind
the main model's last norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octopipe.base.errors import OctoPipeError
from octopipe.huggingface.anatomy import Anatomy
from octopipe.huggingface.labels import IGNORED, CausalLoss, ShardedCausalLoss
from octopipe.huggingface.pieces import Embed, behind_layers, inputs_of, linear_shard
from octopipe.huggingface.shell import LayerAnswers, Unpacked, initialise, zeros_like_all_of

PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Config keys under which families give the number of their multi-token-prediction layers."""
NEEDS = "5.20"
"""The first version of transformers whose prediction layers can be trained."""
USUAL_WEIGHT = 0.3
"""The weight of the predictions' mean loss in most of DeepSeek-V3's training."""
AHEAD = "ahead"
"""Key of the tokens' embeddings in the output of the embedding, if the first layer takes something else."""


def prediction_layers(config: Any) -> int:
    """The number of multi-token-prediction layers that a config has."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, key, None) for key in PREDICTION_KEYS)
    return next((int(count) for count in found if isinstance(count, int) and count > 0), 0)


class WithPredictions(nn.Module):
    """The main model and its prediction layers, with the weight of their mean loss."""

    base_model_prefix = "main"

    def __init__(self, main: nn.Module, predictions: nn.Module, weight: float):
        super().__init__()
        self.main, self.predictions, self.weight = main, predictions, weight
        self.config: Any = main.config

    @property
    def dtype(self) -> torch.dtype:
        return self.main.dtype  # type: ignore[return-value]

    @property
    def depth(self) -> int:
        """The number of tokens that are predicted besides the next one."""
        return len(self.predictions.layers)  # type: ignore[arg-type]

    def get_output_embeddings(self) -> nn.Module:
        return self.main.get_output_embeddings()  # type: ignore[operator]

    def get_input_embeddings(self) -> nn.Module:
        return self.main.get_input_embeddings()  # type: ignore[operator]

    def _init_weights(self, module: nn.Module) -> None:
        self.main._init_weights(module)  # type: ignore[operator]


class EmbedAhead(Embed):
    """The embedding of a model whose first layer takes something other than the tokens' embeddings."""

    def forward(self, batch: Any) -> Any:
        out = super().forward(batch)
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]
        ahead = nn.functional.embedding(inputs_of(batch)["input_ids"], table.weight)
        return {**({"hidden": out} if isinstance(out, Tensor) else out), AHEAD: ahead}


class PredictionLayer(nn.Module):
    """One prediction layer; the first one also runs the main model's last norm."""

    def __init__(
        self,
        shell: nn.Module,
        answers: LayerAnswers,
        anatomy: Anatomy,
        number: int,
        missing: list[tuple[str, Tensor]],
    ):
        """`missing`: parameters of other pieces, of which this piece needs only the shapes."""
        super().__init__()
        self.model = shell
        self._answers, self._anatomy, self._number, self._missing = answers, anatomy, number, missing
        self._on: torch.device | None = None

    def forward(self, embedded: Any, below: Any) -> Tensor:
        """`embedded`: what the embedding returned; `below`: the result of the last layer or of the previous
        prediction."""
        hidden, beside = (below, {}) if isinstance(below, Tensor) else (below["hidden"], below)
        if "position_ids" in beside:
            raise OctoPipeError(
                "prediction layers do not know packed documents (position_ids); train one document per sequence, or "
                "leave --mtp out"
            )
        if self._on != hidden.device:
            self._placeholders_on(hidden.device)
        model: Any = self.model
        if self._number == 0:
            body = model.main.get_decoder()
            hidden = behind_layers(
                self._anatomy, self._answers, hidden, beside, lambda given: body(**given, use_cache=False)[0]
            )
        first = embedded if isinstance(embedded, Tensor) else embedded.get(AHEAD, embedded["hidden"])
        shift = self._number + 1
        # At the end of a sequence there are no tokens ahead; these positions have no labels (`ahead_of`).
        ahead = nn.functional.pad(first, (0, 0, 0, shift))[:, shift:]
        places = torch.arange(shift, ahead.shape[1] + shift, device=ahead.device)[None]
        with Unpacked({}):
            return model.predictions.forward_layer(self._number, hidden, places, None, inputs_embeds=ahead)

    def _placeholders_on(self, device: torch.device) -> None:
        for name, like in self._missing:
            owner, _, attribute = name.rpartition(".")
            object.__setattr__(self.model.get_submodule(owner), attribute, zeros_like_all_of(like, device))
        self._on = device


class PredictionHead(nn.Module):
    """The main model's projection to the vocabulary, for one prediction layer."""

    def __init__(self, shell: nn.Module):
        super().__init__()
        self.model = shell

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model.predictions._project_to_logits(hidden)  # type: ignore[union-attr, operator]

    def vocabulary_shard(self, number: int, count: int) -> nn.Module:
        """A part of the vocabulary (`runtime/stages/shards.py`)."""
        config: Any = self.model.predictions.config  # type: ignore[union-attr]
        if getattr(config, "unpadded_vocab_size", None) is not None:
            raise OctoPipeError(
                "the heads of its predictions leave a part of the vocabulary out and cannot be cut; use a plan with "
                "whole heads (tune without --cut-head)"
            )
        return linear_shard(self, self.model.predictions.shared_head, number, count)  # type: ignore[union-attr, arg-type]


class PredictionLoss:
    """The loss of the prediction layer `number`, counted from 0, multiplied by its part of the weight.

    If the number of labels of the whole batch is given, the loss is a sum divided by it, so that the micro-batches add
    up to the batch. `shifted`: a tensor as target already contains the next tokens.
    """

    in_training_alone = True
    """Whether the loss is left out of evaluations, which measure only the prediction of the next token."""

    def __init__(self, number: int, part: float, *, shifted: bool):
        self.number, self.part, self.shifted = number, part, shifted

    def of_shards(self) -> ShardedPredictionLoss:
        """The same loss, computed from the shards of a split head."""
        return ShardedPredictionLoss(self.number, self.part, shifted=self.shifted)

    def __call__(self, logits: Tensor, target: Any) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        name = "shift_labels" if self.shifted else "labels"
        given = {name: target} if isinstance(target, Tensor) else dict(target)
        labels = given.get("shift_labels")
        if labels is None:
            labels = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]
        wanted = ahead_of(labels, self.number + 1)
        counted: Any = {"num_items_in_batch": given.get("num_items_in_batch"), "shift_labels": wanted}
        return self.part * ForCausalLMLoss(logits, None, logits.shape[-1], **counted)


class ShardedPredictionLoss(ShardedCausalLoss):
    """`PredictionLoss`, computed from the losses of single tokens."""

    in_training_alone = True

    def __init__(self, number: int, part: float, *, shifted: bool):
        super().__init__(shifted=shifted)
        self._ahead, self._part = number + 1, part

    def labels(self, target: Any) -> Tensor:
        return ahead_of(super().next_tokens(target), self._ahead).reshape(-1)

    def of_tokens(self, token_losses: Tensor, target: Any) -> Tensor:
        return self._part * super().of_tokens(token_losses, target)


def ahead_of(labels: Tensor, count: int) -> Tensor:
    """The labels this many tokens further on; positions at the end of a sequence have none."""
    return nn.functional.pad(labels, (0, count), value=IGNORED)[..., count:].contiguous()


def losses_of(model: WithPredictions, own: CausalLoss, ends: tuple[int, ...], *, shifted: bool) -> dict[int, Any]:
    """For every layer at which a path ends, its loss: that of the main model, then those of the predictions."""
    head, *more = ends
    part = model.weight / model.depth
    return {head: own, **{layer: PredictionLoss(k, part, shifted=shifted) for k, layer in enumerate(more)}}


def with_predictions(main: nn.Module, weight: float = USUAL_WEIGHT) -> WithPredictions:
    """A model with the prediction layers of its config, newly created on the model's device."""
    name, count = type(main).__name__, prediction_layers(main.config)
    if not count:
        raise OctoPipeError(f"{name}: its config has no multi-token-prediction layers; leave --mtp out")
    if not weight > 0:
        raise OctoPipeError(f"--mtp {weight:g} gives the predictions no weight; give a number above 0, or leave it out")
    import transformers

    made_by: Any = getattr(transformers.modeling_layers, "MtpModel", None)
    if not hasattr(made_by, "forward_layer"):  # its layers could not be called one by one before
        raise OctoPipeError(
            f"--mtp needs transformers {NEEDS} or newer, and this is {transformers.__version__}; install a newer one, "
            "or leave --mtp out"
        )
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(main.dtype)  # type: ignore[arg-type]
        made = made_by(main, count)
    except Exception as error:  # configs that do not describe their prediction layers
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(
            f"transformers cannot make the multi-token-prediction layers of {name} ({why}); leave --mtp out"
        ) from None
    finally:
        torch.set_default_dtype(before)
    made._init_weights = main._init_weights  # they consist of the same kinds of layers as the main model
    made.embed_tokens = None  # `forward_layer` is called with embeddings
    if not any(p.is_meta for p in made.parameters()):
        made.layers.to(next(main.parameters()).device)
        for module in made.layers.modules():
            initialise(main, module)
    return WithPredictions(main, made.train(main.training), weight)
