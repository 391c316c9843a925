"""Multi-token prediction of transformers' families: trained as a path of its own, or told that it is not."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from effort import WHOLE, some  # noqa: E402
from hf_families import tiny_config  # noqa: E402
from hf_twins import grads_of, make  # noqa: E402
from hf_versions import since  # noqa: E402
from ranks import PATIENCE_S, shared_ranks  # noqa: E402

from octopipe import Pipeline  # noqa: E402
from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.cli import main  # noqa: E402
from octopipe.costs.layer_graph import LayerGraph  # noqa: E402
from octopipe.costs.table import CostTable  # noqa: E402
from octopipe.huggingface import layers, micro_batches  # noqa: E402
from octopipe.huggingface.predictions import NEEDS, prediction_layers, with_predictions  # noqa: E402
from octopipe.huggingface.source import model_class  # noqa: E402
from octopipe.huggingface.weights import first_names  # noqa: E402
from octopipe.search.graphs.cut_branches import cut_plan  # noqa: E402
from octopipe.search.systems import build_plan  # noqa: E402
from octopipe.search.tuner import tune  # noqa: E402

pytestmark = since(NEEDS)
FLAGS = ["--steps", "2", "--seq", "12", "--no-measure", "--micro-batches", "2", "--json"]


def predicting(family: str, count: int) -> Any:
    config = tiny_config(family)
    config.num_mtp_layers = count
    assert prediction_layers(config) == count
    return config


def by_hand(whole: Any, ids: Any, weight: float) -> Any:
    """The loss as DeepSeek-V3's report has it, from the modules alone."""
    body, more = whole.main.model, whole.predictions
    tokens, hidden = ids.shape[1], body(input_ids=ids, use_cache=False).last_hidden_state
    entropy = torch.nn.functional.cross_entropy
    losses = [entropy(whole.main.lm_head(hidden[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())]
    for k, layer in enumerate(more.layers, 1):
        ahead = torch.cat((ids[:, k:], torch.zeros_like(ids[:, :k])), 1)
        joined = torch.cat((layer.enorm(body.embed_tokens(ahead)), layer.hnorm(hidden)), -1)
        places = torch.arange(k, tokens + k)[None]
        mask = torch.full((tokens, tokens), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
        rotary = body.rotary_emb(joined, position_ids=places)
        out = layer.mtp_block(
            layer.eh_proj(joined), attention_mask=mask, position_ids=places, position_embeddings=rotary
        )
        hidden = layer.post_norm(out)
        logits = whole.main.lm_head(hidden[:, : tokens - k - 1]).float().flatten(0, 1)
        losses.append(entropy(logits, ids[:, k + 1 :].flatten()))
    return losses[0] + weight * sum(losses[1:]) / (len(losses) - 1)


def run_along_paths(parts: Any, pieces: list[Any], ids: Any, target: Any) -> Any:
    """The pieces one after another, each on the outputs that it takes; the sum of all losses."""
    out: dict[int, Any] = {}
    for k, piece in enumerate(pieces):
        out[k] = piece(*(out[j] for j in parts.takes[k])) if k else piece({"input_ids": ids})
    return sum(loss(out[k], target) for k, loss in parts.loss_fn.losses.items())


@pytest.mark.parametrize(("family", "tied"), [("deepseek_v3", False), ("glm4_moe", True)])
def test_pieces_along_their_paths_have_the_loss_and_gradients_of_the_modules(family: str, tied: bool) -> None:
    config = predicting(family, 2)
    config.tie_word_embeddings = tied
    parts = layers(copy.deepcopy(config), dtype=torch.float64, predictions=0.3)
    assert parts.stacks.count("predictions.layers") == 2 and parts.class_name == model_class(config).__name__
    pieces = [make(parts, k) for k in range(len(parts))]
    plain = model_class(config)._from_config(config, dtype=torch.float64, experts_implementation="eager")
    whole = with_predictions(plain.train(), 0.3)
    with torch.no_grad():
        for k, piece in enumerate(pieces):
            for name, parameter in piece.named_parameters():
                whole.get_parameter(parts.name_in_model(k, name)).copy_(parameter)
    ids = torch.randint(3, 90, (3, 12), generator=torch.Generator().manual_seed(2))
    theirs = by_hand(whole, ids, 0.3)
    theirs.backward()
    mine = run_along_paths(parts, pieces, ids, ids)
    mine.backward()
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-6)
    first, total = first_names(whole), dict[str, Any]()
    for k, piece in enumerate(pieces):
        for name, grad in grads_of(piece.named_parameters()).items():
            key = first[parts.name_in_model(k, name)]
            total[key] = total[key] + grad if key in total else grad
    expected = grads_of(whole.named_parameters())
    assert total.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(total[name], grad, rtol=1e-5, atol=1e-7)


def test_a_first_layer_that_takes_more_than_the_embedding_leaves_it_to_the_predictions() -> None:
    parts = layers(predicting("inkling_text", 1), dtype=torch.float64, predictions=0.3)
    pieces = [make(parts, k) for k in range(len(parts))]
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(2))
    embedded = pieces[0]({"input_ids": ids})
    table = pieces[0].model.get_input_embeddings().weight
    assert torch.equal(embedded["ahead"], table[ids]) and not torch.equal(embedded["hidden"], table[ids])
    assert isinstance(pieces[1](embedded), torch.Tensor)  # what is ahead goes no further
    run_along_paths(parts, pieces, ids, ids).backward()
    assert pieces[-2].model.predictions.layers[0].eh_proj.weight.grad.abs().max() > 0


def test_layers_say_what_they_take_and_what_they_share() -> None:
    config = predicting("deepseek_v3", 2)
    parts = layers(copy.deepcopy(config), predictions=0.3)
    blocks = config.num_hidden_layers
    assert parts.takes[1:-4] == tuple((k,) for k in range(blocks + 1))
    assert parts.takes[-4:] == ((0, blocks), (blocks + 2,), (0, blocks + 2), (blocks + 4,))
    words = config.vocab_size * config.hidden_size
    heads = (blocks + 1, blocks + 3, blocks + 5)
    assert dict(parts.shared) == {(blocks + 1, blocks + 2): config.hidden_size, heads: words}
    config.tie_word_embeddings = True
    assert dict(layers(config, predictions=0.3).shared)[(0, *heads)] == words


def two_rows(parts: Any, rows: int) -> tuple[list[Any], list[Any]]:
    ids = torch.randint(3, 90, (rows, 10), generator=torch.Generator().manual_seed(5))
    return micro_batches({"input_ids": ids, "labels": ids}, rows)


def gradients_on_ranks(world: Any, tied: bool, plans: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    parts, out = tied_parts(tied), {}
    for name, plan in plans.items():
        made = [lambda k=k: make(parts, k) for k in range(len(parts))]
        inputs, targets = two_rows(parts, plan.num_micro_batches)
        with Pipeline(made, plan, parts.loss_fn, group=world, timeout_s=PATIENCE_S) as pipe:
            loss = float(pipe.step(inputs, targets).detach())
            named = ((key.split(".", 1), p) for key, p in pipe.named_parameters())
            found = grads_of((parts.name_in_model(int(k), own), p) for (k, own), p in named)
            out[name] = loss, found, float(pipe.evaluate(inputs, targets))
    return out


def tied_parts(tied: bool) -> Any:
    config = predicting("deepseek_v3", 2)
    config.tie_word_embeddings = tied
    return layers(config, dtype=torch.float64, predictions=0.3)


def graph_costs(parts: Any) -> CostTable:
    count = len(parts)
    costs = CostTable.uniform(num_layers=count, p2p_ms=0.1, model="tiny")
    return costs.replace(graph=LayerGraph(takes=parts.takes), boundary_bytes=np.ones(count))


def summed_gradients(parts: Any, pieces: list[Any], first: dict[str, str]) -> dict[str, Any]:
    """The pieces' gradients by the first name of each parameter, summed over the pieces that hold it."""
    found: dict[str, Any] = {}
    for k, piece in enumerate(pieces):
        for name, grad in grads_of(piece.named_parameters()).items():
            key = first[parts.name_in_model(k, name)]
            found[key] = found[key] + grad if key in found else grad
    return found


@pytest.mark.parametrize("case", some([(2, True), (2, False), (4, False), (4, True)]), ids=str)
def test_predictions_on_ranks_have_the_gradients_of_one_process(case: tuple[int, bool]) -> None:
    size, tied = case
    parts = tied_parts(tied)
    costs = graph_costs(parts)
    tuned = tune(costs, size, 4, iterations=200, seed=0, copies=False).plan
    plans = {"1f1b": build_plan("1f1b", costs, size, 4), "zb-h1": build_plan("zb-h1", costs, size, 4), "tuned": tuned}
    assert all(plan.forks for plan in plans.values())
    if not WHOLE:  # B of 1F1B is in both others; the test of cut heads runs I and W as ZB-H1 orders them
        plans = {name: plans[name] for name in ("1f1b", "tuned")}
    pieces = [make(parts, k) for k in range(len(parts))]
    inputs, targets = two_rows(parts, 4)
    each = [run_along_paths(parts, pieces, x["input_ids"], y) for x, y in zip(inputs, targets, strict=True)]
    expected = sum(each) / 4
    expected.backward()
    first = first_names(parts._cut.model)
    theirs = summed_gradients(parts, pieces, first)
    for rank in shared_ranks(size).run(gradients_on_ranks, tied, plans):
        for loss, grads, again in rank.values():
            assert loss == pytest.approx(float(expected.detach()), rel=1e-6) and again == pytest.approx(loss, rel=1e-6)
            for name, grad in grads.items():
                assert float((grad - theirs[first[name]]).abs().max()) <= 1e-12, name


def exact_loss(parts: Any, pieces: list[Any], ids: Any, target: Any) -> Any:
    """The same sum of losses in double precision: transformers' own is computed in single precision."""
    out: dict[int, Any] = {}
    total = torch.zeros((), dtype=torch.float64)
    for k, piece in enumerate(pieces):
        out[k] = piece(*(out[j] for j in parts.takes[k])) if k else piece({"input_ids": ids})
    for number, head in enumerate(parts.loss_fn.losses):
        logits, labels = out[head][:, : -1 - number].flatten(0, 1), ids[:, 1 + number :].flatten()
        part = 1.0 if number == 0 else 0.3 / 2
        entropy = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        total = total + part * entropy / target["num_items_in_batch"]
    return total


@pytest.mark.parametrize("size", some([2, 4]))
def test_heads_that_are_cut_on_ranks_have_the_gradients_of_one_process(size: int) -> None:
    parts = tied_parts(False)
    costs = graph_costs(parts)
    assert costs.graph is not None
    heads = costs.graph.ends
    plans = {
        f"{name} {count}": cut_plan(build_plan(name, costs, size, 4), costs, heads, count)
        for name, count in (("zb-h1", size), ("1f1b", 2))[: 2 if WHOLE else 1]
    }
    assert all(plan is not None and plan.cut_heads == set(heads) for plan in plans.values())
    pieces = [make(parts, k) for k in range(len(parts))]
    each = [exact_loss(parts, pieces, x["input_ids"], y) for x, y in zip(*two_rows(parts, 4), strict=True)]
    mean = sum(each) / 4
    mean.backward()
    first = first_names(parts._cut.model)
    theirs = summed_gradients(parts, pieces, first)
    found = shared_ranks(size).run(gradients_on_ranks, False, plans)
    for name, plan in plans.items():
        assert plan is not None
        ranks, seen = plan.shards()[heads[0]], set()
        for number, rank in enumerate(found):
            loss, grads, again = rank[name]
            assert loss == pytest.approx(float(mean.detach()), rel=1e-9) and again == pytest.approx(loss, rel=1e-9)
            for key, grad in grads.items():
                wanted = theirs[first[key]]
                if grad.shape != wanted.shape:
                    wanted = wanted.tensor_split(len(ranks))[ranks.index(number)]
                # DeepSeek's router computes in single precision, whose rounding depends on the last digit of its input;
                # tests/runtime/test_path_combinations.py has layers in double precision.
                assert float((grad - wanted).abs().max()) <= 1e-6, key
                seen.add(first[key])
        assert seen == theirs.keys()


def test_ranks_train_predictions_as_one_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicting("deepseek_v3", 1).save_pretrained(tmp_path)
    model, found = str(tmp_path / "config.json"), {}
    for ranks, more in ((1, ["--mtp"]), (2, ["--mtp"]), (1, [])):
        assert main(["train", model, "--nproc", str(ranks), *FLAGS, *more]) == 0
        heard = capsys.readouterr()
        found[ranks, bool(more)] = json.loads(heard.out)
        assert ("multi-token-prediction layer" in heard.err) == (not more)
    one, two, without = found[1, True], found[2, True], found[1, False]
    assert "multi-token prediction (weight 0.3)" in one["layers"]
    assert one["losses"] == pytest.approx(two["losses"], rel=1e-6)
    assert one["losses"][0] > 1.2 * without["losses"][0]


def test_what_is_left_out_is_told_and_plans_of_it_say_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicting("deepseek_v3", 1).save_pretrained(tmp_path)
    model, plan = str(tmp_path / "config.json"), str(tmp_path / "plan.json")
    assert main(["train", model, "--nproc", "1", *FLAGS, "--own-layers"]) == 0
    assert "has 1 multi-token-prediction layer, and octopipe's own layers have none" in capsys.readouterr().err
    asked = ["--pp", "1", "--micro-batches", "2", "--seq", "64", "--budget", "1s", "-o", plan]
    assert main(["tune", model, *asked]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "tune a profile (octopipe profile --mtp)" in said and f"octopipe train {model}" not in said
    assert main(["train", model, "--plan", plan, "--no-measure"]) == 2
    assert "octopipe profile --mtp, then tune the profile" in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_of_the_config_with_its_predictions_trains_as_one_process_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicting("deepseek_v3", 1).save_pretrained(tmp_path)
    model, plan = str(tmp_path / "config.json"), str(tmp_path / "plan.json")
    asked = ["--pp", "2", "--micro-batches", "2", "--seq", "12", "--iterations", "50", "--no-copies", "-o", plan]
    assert main(["tune", model, *asked, "--mtp"]) == 0
    assert "--mtp" in capsys.readouterr().out.split("octopipe train")[1]
    found = []
    for more in (["--nproc", "1"], ["--nproc", "2", "--plan", plan]):
        assert main(["train", model, *FLAGS, "--mtp", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["losses"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert main(["train", model, *FLAGS, "--plan", plan, "--nproc", "2"]) == 2
    assert "the plan was made with its multi-token prediction; add --mtp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("family", "count", "flags", "why"),
    [
        ("deepseek_v3", 1, ["--mtp", "0"], "gives the predictions no weight"),
        ("deepseek_v3", 1, ["--mtp", "--own-layers"], "octopipe's own layers predict one token"),
        ("llama", 0, ["--mtp"], "LlamaForCausalLM: its config has no multi-token-prediction layers"),
    ],
)
def test_predictions_that_cannot_be_trained_are_refused(
    family: str, count: int, flags: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(family)
    if count:
        config.num_mtp_layers = count
    config.save_pretrained(tmp_path)
    assert main(["train", str(tmp_path / "config.json"), "--nproc", "1", *FLAGS, *flags]) == 2
    err = capsys.readouterr().err.strip()
    assert why in err and len(err.splitlines()) == 1


def test_a_config_that_does_not_describe_its_predictions_is_refused() -> None:
    config = tiny_config("nemotron_h")
    config.num_nextn_predict_layers = 1
    with pytest.raises(OctoPipeError, match="transformers cannot make the multi-token-prediction layers of NemotronH"):
        layers(config, predictions=0.3)


def test_a_version_whose_predictions_cannot_be_trained_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 5.17 has layers that only generate; older ones have none."""
    config = predicting("deepseek_v3", 1)
    main_model = model_class(config)._from_config(config)
    for older in (type("MtpModel", (), {}), None):
        monkeypatch.setattr(transformers.modeling_layers, "MtpModel", older)
        with pytest.raises(OctoPipeError, match=rf"--mtp needs transformers {NEEDS} or newer, and this is 5"):
            with_predictions(main_model)
