"""Multi-token prediction: a causal language model of transformers together with its prediction layers, for training.

Knows: how the main model's last hidden state passes through the prediction layers, one after the other, and which
tokens each of them predicts. Does not know: how models are split (`sections.py` finds the prediction layers as a stack
of their own), or how weights are drawn.

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
from octopipe.huggingface.labels import IGNORED
from octopipe.huggingface.shell import initialise

PREDICTION_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
"""Config keys under which families give the number of their multi-token-prediction layers."""
USUAL_WEIGHT = 0.3
"""Of the predictions' mean loss, as for most of DeepSeek-V3's training."""


def prediction_layers(config: Any) -> int:
    """How many multi-token-prediction layers a config has."""
    text = config.get_text_config(decoder=True)
    found = (getattr(text, key, None) for key in PREDICTION_KEYS)
    return next((int(count) for count in found if isinstance(count, int) and count > 0), 0)


class WithPredictions(nn.Module):
    """The main model and its prediction layers in one forward; logits are [batch, 1 + predictions, tokens, words]."""

    base_model_prefix = "main"

    def __init__(self, main: nn.Module, predictions: nn.Module, weight: float):
        super().__init__()
        self.main, self.predictions = main, predictions
        self.config: Any = main.config
        self.prediction_loss = PredictionLoss(weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.main.dtype  # type: ignore[return-value]

    def get_output_embeddings(self) -> nn.Module:
        return self.main.get_output_embeddings()  # type: ignore[operator, no-any-return]

    def get_input_embeddings(self) -> nn.Module:
        return self.main.get_input_embeddings()  # type: ignore[operator, no-any-return]

    def _init_weights(self, module: nn.Module) -> None:
        self.main._init_weights(module)  # type: ignore[operator]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        main, more = self.main, self.predictions
        body: Any = main.get_decoder()  # type: ignore[operator]
        hidden = body(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        found = [hidden]
        for k in range(len(more.layers)):  # type: ignore[arg-type]
            ahead = nn.functional.pad(input_ids, (0, k + 1))[:, k + 1 :]
            hidden = more.forward_layer(k, hidden, positions + k + 1, None, input_ids=ahead)  # type: ignore[operator]
            found.append(hidden)
        logits = [more._project_to_logits(states) for states in found]  # type: ignore[operator]
        return CausalLMOutputWithPast(logits=torch.stack(logits, 1))


class PredictionLoss:
    """The next token's loss and `weight` times the mean loss of the predictions; targets as transformers takes them.

    Where the number of labels of a whole batch is given, every loss is a sum over it, so that micro-batches add up.
    """

    def __init__(self, weight: float):
        self.weight = weight

    def __call__(
        self,
        *,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **_: Any,
    ) -> Tensor:
        from transformers.loss.loss_utils import ForCausalLMLoss

        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        losses = []
        for k in range(logits.shape[1]):
            wanted = nn.functional.pad(shift_labels, (0, k), value=IGNORED)[..., k:].contiguous()
            mine: Any = {"num_items_in_batch": num_items_in_batch, "shift_labels": wanted}
            losses.append(ForCausalLMLoss(logits[:, k], None, vocab_size, **mine))
        return losses[0] + self.weight * torch.stack(losses[1:]).mean()  # type: ignore[no-any-return]


def with_predictions(main: nn.Module, weight: float = USUAL_WEIGHT) -> WithPredictions:
    """A model with the prediction layers of its config, freshly made where the model is."""
    name, count = type(main).__name__, prediction_layers(main.config)
    if not count:
        raise OctoPipeError(f"{name}: its config has no multi-token-prediction layers; leave --mtp out")
    if not weight > 0:
        raise OctoPipeError(f"--mtp {weight:g} gives the predictions no weight; give a number above 0, or leave it out")
    try:
        from transformers.modeling_layers import MtpModel
    except ImportError:
        raise OctoPipeError(
            "this transformers has no multi-token-prediction layers (MtpModel); use 5.23 or newer, or leave --mtp out"
        ) from None
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(main.dtype)  # type: ignore[arg-type]
        made = MtpModel(main, count)  # type: ignore[arg-type]
    except Exception as error:  # configs that do not say what their prediction layers are
        why = " ".join(str(error).split())[:160]
        raise OctoPipeError(
            f"transformers cannot make the multi-token-prediction layers of {name} ({why}); leave --mtp out"
        ) from None
    finally:
        torch.set_default_dtype(before)
    made._init_weights = main._init_weights  # type: ignore[method-assign, assignment]  # the same kinds of layers
    if not any(p.is_meta for p in made.parameters()):
        made.layers.to(next(main.parameters()).device)
        for module in made.layers.modules():
            initialise(main, module)
    return WithPredictions(main, made.train(main.training), weight)
