"""The layers against plain recurrences and definitions, in float64, and through the split backward."""

import math

import pytest
from effort import WHOLE

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from octopipe.base.errors import OctoPipeError  # noqa: E402
from octopipe.models import layers as L  # noqa: E402
from octopipe.models import mixers as X  # noqa: E402
from octopipe.models import zoo  # noqa: E402
from octopipe.models.spec import ModelSpec  # noqa: E402
from octopipe.runtime.nn import LazyLogits, build_layers, cross_entropy, tie  # noqa: E402
from octopipe.runtime.nn.attention import Rotary, attend  # noqa: E402
from octopipe.runtime.nn.basic import causal_conv  # noqa: E402
from octopipe.runtime.nn.delta import delta_scan  # noqa: E402
from octopipe.runtime.nn.kernels import Kernels  # noqa: E402
from octopipe.runtime.nn.mamba import compiled_mamba2_mix, selective_scan, ssd_scan  # noqa: E402
from octopipe.runtime.nn.moe import Moe  # noqa: E402
from octopipe.runtime.stages.shards import JoinedShards, MeanCrossEntropy  # noqa: E402
from octopipe.runtime.stages.stage import Stage  # noqa: E402

H = 16
MIXERS = {
    "attention": X.Attention(hidden=H, heads=4, kv_heads=2, head_dim=8, rope_theta=1e4),
    "attention, all options": X.Attention(
        hidden=H, heads=4, kv_heads=2, head_dim=8, rope_theta=1e4, rotary_dim=4, qkv_bias=True, out_bias=True,
        qk_norm=True, sinks=True, gated=True, norm="layer", post_norm=True, window=5,
    ),
    "latent": X.LatentAttention(
        hidden=H, heads=2, q_rank=8, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=6, bias=True
    ),
    "latent, full queries": X.LatentAttention(
        hidden=H, heads=2, q_rank=None, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=4
    ),
    "mamba1": X.Mamba1(hidden=H, inner=24, state=4, dt_rank=4),
    "mamba1, no norms": X.Mamba1(hidden=H, inner=24, state=4, dt_rank=4, inner_norms=False),
    "mamba2": X.Mamba2(hidden=H, heads=4, head_dim=8, state=8, groups=2, chunk=4),
    "gated delta net": X.GatedDeltaNet(hidden=H, key_heads=2, value_heads=4, key_dim=4, value_dim=6, chunk=4),
    "lightning": X.LightningAttention(hidden=H, heads=2, head_dim=8, chunk=4),
    "relu2": L.Mlp(hidden=H, ffn=24, activation="relu2"),
    "swiglu": L.Mlp(hidden=H, ffn=24, bias=True, norm="layer", post_norm=True),
    "gelu": L.Mlp(hidden=H, ffn=24, activation="gelu"),
    "moe": L.Moe(hidden=H, experts=5, top_k=2, ffn=8),
    "moe, all options": L.Moe(
        hidden=H, experts=5, top_k=2, ffn=8, activation="relu2", shared_ffn=8, shared_gate=True, bias=True,
        latent=8,
    ),
}  # fmt: skip


def _model(*inner, tied=False, **embedding):
    first = L.Embedding(hidden=H, vocab=32, **embedding)
    return ModelSpec(name="tiny", layers=(first, *inner, L.Head(hidden=H, vocab=32, tied=tied)))


def _layer(layer, seed=0):
    """The module for one layer, with every parameter away from its special start (zero, one)."""
    module = build_layers(_model(layer), dtype=torch.float64, seed=seed)[1]()
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.1)
    return module


def _randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _equal(a, b, tolerance=1e-12):
    assert a.shape == b.shape
    assert float((a - b).detach().abs().max()) <= tolerance * max(1.0, float(b.detach().abs().max()))


@pytest.mark.parametrize("name", MIXERS)
def test_parameter_counts_are_the_specs_own(name):
    module = build_layers(_model(MIXERS[name]))[1]()
    assert sum(p.numel() for p in module.parameters()) == MIXERS[name].parameters


@pytest.mark.parametrize("name", MIXERS)
def test_a_token_never_sees_a_later_one(name):
    module, x = _layer(MIXERS[name]).requires_grad_(False), _randn(2, 11, H)
    y = module(x)
    assert y.shape == x.shape and bool(y.isfinite().all())
    changed = x.clone()
    changed[:, 7:] = _randn(2, 4, H, seed=1)
    _equal(module(changed)[:, :7], y[:, :7])
    assert float((module(changed)[:, 7:] - y[:, 7:]).abs().max()) > 1e-3


@pytest.mark.parametrize("name", MIXERS)
def test_split_backward_gives_autograds_gradients(name):
    module, x = _layer(MIXERS[name]), _randn(2, 11, H).requires_grad_()
    params = list(module.parameters())
    y = module(x)
    want = torch.autograd.grad((y**2).sum(), [x, *params])
    for ops in ("B", "IW", "RIW") if WHOLE else ("B", "RIW"):
        run = Stage([module]).forward(x, recompute="R" in ops)
        g = 2 * run.outputs
        if "R" in ops:
            run.recompute()
        (gx,) = run.backward_full(g) if ops == "B" else run.backward_input(g)
        assert ops == "B" or len(run._queue) >= 2
        run.backward_weight()
        for a, b in zip([gx, *(p.grad for p in params)], want, strict=True):
            _equal(a, b)
        for p in params:
            p.grad = None


@pytest.mark.parametrize("tokens", [1, 4, 8, 13])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_mamba2_scan_equals_the_recurrence(tokens, groups):
    x = _randn(2, tokens, 4, 3)
    b, c = _randn(2, tokens, groups, 5, seed=1), _randn(2, tokens, groups, 5, seed=2)
    decay = -_randn(2, tokens, 4, seed=3).exp()
    inputs = [t.requires_grad_() for t in (x, decay, b, c)]
    state, out = torch.zeros(2, 4, 5, 3, dtype=torch.float64), []
    bh, ch = (t.repeat_interleave(4 // groups, dim=2) for t in (b, c))
    for t in range(tokens):
        state = decay[:, t, :, None, None].exp() * state + bh[:, t, :, :, None] * x[:, t, :, None]
        out.append((ch[:, t, :, None] @ state)[:, :, 0])
    want = torch.stack(out, 1)
    got = ssd_scan(x, decay, b, c, 4)
    _equal(got, want)
    w = _randn(*want.shape, seed=4)
    grads = zip(torch.autograd.grad((got * w).sum(), inputs), torch.autograd.grad((want * w).sum(), inputs))
    for a, b in grads:
        _equal(a, b, 1e-11)


def test_mamba2_scan_survives_decays_that_underflow():
    x, b, c = _randn(1, 16, 1, 2).float(), _randn(1, 16, 1, 2).float(), _randn(1, 16, 1, 2).float()
    decay = torch.full((1, 16, 1), -50.0, requires_grad=True)
    y = ssd_scan(x, decay, b, c, 8)
    y.sum().backward()
    assert bool(y.isfinite().all()) and bool(decay.grad.isfinite().all())


@pytest.mark.parametrize("tokens", [2, 5, 16, 19])
def test_mamba1_scan_equals_the_recurrence(tokens):
    u, dt = _randn(2, tokens, 6), _randn(2, tokens, 6, seed=1).exp()
    a, b, c = -_randn(6, 3, seed=2).exp(), _randn(2, tokens, 3, seed=3), _randn(2, tokens, 3, seed=4)
    inputs = [t.requires_grad_() for t in (u, dt, a, b, c)]
    state, out = torch.zeros(2, 6, 3, dtype=torch.float64), []
    for t in range(tokens):
        state = (dt[:, t, :, None] * a).exp() * state + u[:, t, :, None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(-1))
    want = torch.stack(out, 1)
    got = selective_scan(u, dt, a, b, c, block=4)
    _equal(got, want)
    got_grads, want_grads = (torch.autograd.grad((y**2).sum(), inputs) for y in (got, want))
    for g, w in zip(got_grads, want_grads, strict=True):
        _equal(g, w, 1e-11)


@pytest.mark.parametrize(("tokens", "chunk", "alike"), [(1, 4, 0), (4, 4, 0), (11, 4, 0), (150, 64, 0), (100, 40, 1)])
def test_gated_delta_rule_equals_the_recurrence(tokens, chunk, alike):
    """Also for keys that are nearly the same, where the triangular systems are at their worst."""
    q, k, v = (_randn(2, 3, tokens, 4, seed=s) for s in range(3))
    k = F.normalize(1e-3 * k + 1 if alike else k, dim=-1)
    decay, beta = -_randn(2, 3, tokens, seed=4).exp(), _randn(2, 3, tokens, seed=5).sigmoid()
    inputs = [t.detach().requires_grad_() for t in (q, k, v, decay, beta)]
    q, k, v, decay, beta = inputs
    state, out = torch.zeros(2, 3, 4, 4, dtype=torch.float64), []
    for t in range(tokens):
        state = state * decay[:, :, t, None, None].exp()
        wrong = v[:, :, t] - (k[:, :, t, None] @ state)[:, :, 0]
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * wrong)[:, :, None]
        out.append((q[:, :, t, None] @ state)[:, :, 0])
    want = torch.stack(out, 2)
    got = delta_scan(q, k, v, decay, beta, chunk)
    _equal(got, want)
    got_grads, want_grads = (torch.autograd.grad((y**2).sum(), inputs) for y in (got, want))
    for g, w in zip(got_grads, want_grads, strict=True):
        _equal(g, w, 1e-10)


def test_the_delta_rule_in_bfloat16_is_as_near_as_its_operands():
    """Against float64 on the same rounded operands: products read bfloat16, sums and states stay wide."""
    q, k, v = (F.normalize(_randn(1, 2, 256, 16, seed=s), dim=-1).bfloat16() for s in range(3))
    decay, beta = -0.1 * _randn(1, 2, 256, seed=4).exp(), _randn(1, 2, 256, seed=5).sigmoid()
    want = delta_scan(q.double(), k.double(), v.double(), decay, beta, 64)
    got = delta_scan(q, k, v, decay.float(), beta.float(), 64)
    assert got.dtype is torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 1e-2


@pytest.mark.parametrize("window", [None, 1, 3, 4, 50])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_equals_its_definition(window, sinks):
    q, k, v = _randn(2, 4, 11, 8), _randn(2, 2, 11, 8, seed=1), _randn(2, 2, 11, 8, seed=2)
    sink = _randn(4, seed=3).requires_grad_() if sinks else None
    i, j = torch.arange(11)[:, None], torch.arange(11)[None]
    seen = (j <= i) & (j > i - (window or 99))
    logits = q @ k.repeat_interleave(2, 1).mT / math.sqrt(8)
    logits = logits.masked_fill(~seen, -torch.inf)
    if sink is not None:
        logits = torch.cat((logits, sink[None, :, None, None].expand(2, 4, 11, 1)), -1)
    want = logits.softmax(-1)[..., :11] @ v.repeat_interleave(2, 1)
    got = attend(q, k, v, window=window, sinks=sink)
    _equal(got, want)
    if sink is not None:
        _equal(torch.autograd.grad((got**2).sum(), sink)[0], torch.autograd.grad((want**2).sum(), sink)[0])


def test_rotary_products_depend_on_the_distance_alone():
    turn = Rotary(8, 1e4)
    q, k = _randn(1, 1, 1, 8).expand(1, 1, 9, 8), _randn(1, 1, 1, 8, seed=1).expand(1, 1, 9, 8)
    products = (turn(q) @ turn(k).mT)[0, 0]
    _equal(products[2:, 2:], products[:-2, :-2])
    _equal(products[0, 0], (q[0, 0, 0] * k[0, 0, 0]).sum())


def test_causal_convolution_equals_its_definition():
    x, w, b = _randn(2, 6, 3), _randn(3, 4, seed=1), _randn(3, seed=2)
    want = b + sum(w[:, 3 - s] * F.pad(x, (0, 0, s, 0))[:, :6] for s in range(4))
    _equal(causal_conv(x, w, b), want)


def test_moe_equals_every_token_through_its_experts():
    layer = MIXERS["moe"]
    module, x = _layer(layer), _randn(2, 7, H)
    assert isinstance(module, Moe)
    n = module.norm(x).view(-1, H)
    want = torch.zeros_like(n)
    for t in range(n.shape[0]):
        weights, chosen = module.router(n[t]).topk(layer.top_k)
        for w, e in zip(weights.softmax(-1), chosen):
            gate, up = (n[t] @ module.up[e]).chunk(2)
            want[t] += w * ((F.silu(gate) * up) @ module.down[e])
    _equal(module(x) - x, want.view(x.shape))


@pytest.mark.parametrize(("tied", "kind"), [(True, "lean"), (False, "lean"), (True, "chunked"), (False, "chunked")])
def test_a_model_with_the_lean_loss_equals_plain_cross_entropy(tied, kind):
    spec = _model(MIXERS["mamba2"], L.Block(mixer=MIXERS["attention"], ffn=MIXERS["moe"]), tied=tied)
    tokens = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(0))
    target = tokens.roll(-1, 1)
    target[0, 3:5] = -100
    lean = [make() for make in build_layers(spec, dtype=torch.float64, seed=3, kernels=Kernels(loss=kind))]
    full = [make() for make in build_layers(spec, dtype=torch.float64, seed=3, lean_head=False)]
    for modules in (lean, full):
        tie(modules)
    assert (lean[0].weight is lean[-1].weight) == tied
    x = tokens
    for m in full:
        x = m(x)
    loss = F.cross_entropy(x.flatten(0, 1), target.flatten())
    loss.backward()
    assert abs(float(loss.detach()) - math.log(32)) < 0.5
    for ops in ("B", "IW", "RIW"):
        first, last = Stage(lean[:2], input_grad=False), Stage(lean[2:])
        a = first.forward(tokens, recompute="R" in ops)
        b = last.forward(a.outputs, then=lambda out: cross_entropy(out, target), recompute="R" in ops)
        _equal(b.outputs, loss.detach())
        grads = None
        for run in (b, a):
            if "R" in ops:
                run.recompute()
            grads = run.backward_full(grads) if ops == "B" else run.backward_input(grads)
        if ops != "B":
            assert lean[-1].weight.grad is None  # both uses of a tied weight wait for W, too
        a.backward_weight()
        b.backward_weight()
        for m, n in zip(lean, full):
            for p, q in zip(m.parameters(), n.parameters(), strict=True):
                _equal(p.grad, q.grad)
        for m in lean:
            m.zero_grad(set_to_none=True)


def test_lean_loss_works_outside_a_stage_and_in_blocks():
    hidden, weight = _randn(10, H).requires_grad_(), _randn(32, H, seed=1).requires_grad_()
    target = torch.arange(10) % 32
    want = F.cross_entropy(hidden @ weight.t(), target)
    want_grads = torch.autograd.grad(want, (hidden, weight))
    from octopipe.runtime.nn.head import LeanCrossEntropy

    for block, kind in ((1, "lean"), (3, "lean"), (100, "lean"), (3, "chunked")):
        got = LeanCrossEntropy.apply(hidden, weight, target, -100, block, None, kind)
        _equal(got, want)
        for a, b in zip(torch.autograd.grad(got * 2, (hidden, weight)), want_grads):
            _equal(a, 2 * b)
    _equal(cross_entropy(LazyLogits(hidden, weight), target), want)
    _equal(cross_entropy(hidden @ weight.t(), target), want)
    assert float(cross_entropy(LazyLogits(hidden, weight), torch.full((10,), -100)).detach()) == 0.0


@pytest.mark.parametrize("kind", ["lean", "chunked"])
def test_shards_of_the_lean_head_give_the_loss_and_gradients_of_the_whole_one(kind):
    torch.manual_seed(1)
    hidden = torch.randn(2, 7, 6, dtype=torch.float64) * 4
    weight = torch.randn(23, 6, dtype=torch.float64)
    target = torch.randint(23, (2, 7))
    target[0, 2] = target[1, 5] = -100
    hidden[1, 0] *= 200  # shards without any share in a token's softmax

    def whole(h, w):
        return F.cross_entropy(F.linear(h, w).flatten(0, 1), target.flatten())

    def in_shards(h, w):
        cut, pairs = MeanCrossEntropy(), []
        for start, stop in ((0, 9), (9, 10), (10, 23)):
            module = torch.nn.Module()
            module.shard_start = start
            pairs.append(cut.partial(module)(LazyLogits(h, w[start:stop], kind), target))
        return cut.of_tokens(JoinedShards()(*pairs), target)

    expected, found = ([], [])
    for loss, out in ((whole, expected), (in_shards, found)):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        value = loss(h, w)
        value.backward()
        out += [value.detach(), h.grad, w.grad]
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_shard_in_bfloat16_is_as_near_as_its_operands_and_holds_one_number_per_word():
    torch.manual_seed(2)
    hidden, weight = torch.randn(64, 32) * 0.5, torch.randn(400, 32)
    labels = torch.randint(400, (64,))

    def gradients(dtype):
        h, w = (t.to(dtype).requires_grad_() for t in (hidden, weight))
        held = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
            sums, picked = LazyLogits(h, w[100:300]).partial_softmax(labels, 100)
        # A shard with little share in some softmaxes: the target's slope is far larger than its share.
        slopes = torch.logspace(-12, 0, 64, dtype=sums.dtype) / 64
        (sums * slopes - picked / 64).sum().backward()
        return h.grad.double(), w.grad.double(), max(t.numel() * t.element_size() for t in held)

    want_h, want_w, _ = gradients(torch.float64)
    h, w, largest = gradients(torch.bfloat16)
    assert (h - want_h).norm() <= 0.01 * want_h.norm() and (w - want_w).norm() <= 0.01 * want_w.norm()
    assert largest == 64 * 200 * 2


def test_the_chunked_loss_holds_nothing_of_the_vocabularys_size():
    hidden = _randn(40, H).requires_grad_()
    weight = nn.Parameter(_randn(500, H, seed=1))
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.nbytes) or t, lambda t: t):
        cross_entropy(LazyLogits(hidden, weight, "chunked"), torch.arange(40))
    assert sum(held) < 40 * 500 * 8 and max(held) == weight.nbytes


def test_what_the_compiler_fuses_is_the_same_loss():
    from octopipe.runtime.nn.head import _fusible_slopes, block_slopes

    logits, index = 5 * _randn(6, 50), torch.arange(6)[:, None]
    for got, want in zip(
        _fusible_slopes(logits, index, torch.float64, torch.float64),
        block_slopes(logits, index, torch.float64, torch.float64),
    ):
        _equal(got, want)


def test_a_layers_start_does_not_depend_on_what_else_is_built():
    spec = _model(*MIXERS.values(), positions=12)
    factories = build_layers(spec, seed=5)
    alone = factories[7]()
    all_of_them = [make() for make in factories]
    for a, b in zip(alone.parameters(), all_of_them[7].parameters(), strict=True):
        assert torch.equal(a, b)
    other = build_layers(spec, seed=6)[7]()
    assert any(not torch.equal(a, b) for a, b in zip(alone.parameters(), other.parameters()))
    assert all(bool(p.isfinite().all()) for m in all_of_them for p in m.parameters())
    x = torch.arange(10)[None]
    for m in all_of_them:
        x = m(x)
    assert isinstance(x, LazyLogits) and x.logits().shape == (1, 10, 32)


def test_a_tied_head_starts_as_the_embedding_without_a_message():
    factories = build_layers(_model(MIXERS["relu2"], tied=True), seed=5)
    first, last = factories[0](), factories[-1]()
    assert torch.equal(first.weight, last.weight) and first.weight is not last.weight
    assert first.tied_to == last.tied_to == {"weight": "embedding"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_layers_stay_near_float64(dtype):
    spec = _model(*MIXERS.values())
    wide = build_layers(spec, dtype=torch.float64)
    for i, name in enumerate(MIXERS, 1):
        reference = wide[i]()
        low = build_layers(spec, dtype=dtype)[i]()
        low.load_state_dict(reference.state_dict())
        x = _randn(2, 11, H)
        y = low(x.to(dtype))
        assert y.dtype is dtype
        if "moe" not in name:  # rounding may route a token elsewhere
            _equal(y.double(), reference(x), 0.05 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.slow
def test_compiled_mamba2_leaves_the_projections_split():
    torch._dynamo.reset()
    module, x = _layer(MIXERS["mamba2"]), _randn(2, 11, H)
    want = torch.autograd.grad(module(x).sum(), list(module.parameters()))
    module.mix = compiled_mamba2_mix(backend="aot_eager", fullgraph=True)
    run = Stage([module]).forward(x)
    run.backward_input(torch.ones_like(run.outputs))
    assert len(run._queue) == 2
    run.backward_weight()
    for p, w in zip(module.parameters(), want, strict=True):
        _equal(p.grad, w)


def test_layers_without_a_module_are_named_with_the_remedy():
    kimi = X.KimiDeltaAttention(hidden=H, heads=2, head_dim=8)
    with pytest.raises(OctoPipeError, match=r"layer 1 is a kimi_delta_attention.*your own"):
        build_layers(_model(kimi))
    block = L.Block(mixer=MIXERS["attention"], ffn=MIXERS["relu2"])
    with pytest.raises(OctoPipeError, match="without_mtp"):
        build_layers(_model(L.Mtp(vocab=32, block=block)))


@pytest.mark.parametrize("name", ["nemotron-h-8b", "llama3-8b", "jamba-52b", "gpt-13b", "gpt-oss-20b"])
def test_presets_shrink_to_models_that_run(name):
    spec = zoo.preset(name).scaled(1 / 64, num_layers=7)
    modules = [make() for make in build_layers(spec)]
    tie(modules)
    count = {p: p.numel() for m in modules for p in m.parameters()}
    assert sum(count.values()) == spec.parameters
    x = tokens = torch.zeros(1, 8, dtype=torch.long)
    for module in modules:
        x = module(x)
    assert bool(cross_entropy(x, tokens).isfinite())


def test_rows_added_by_number_have_the_gradient_of_a_lookup() -> None:
    from octopipe.runtime.nn.moe import AddRows

    torch.manual_seed(0)
    which = torch.tensor([2, 0, 2, 2, 1, 2])
    given = [torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)]
    weight = torch.randn(6, 5, dtype=torch.float64)
    found = []
    for add in (lambda x, t: AddRows.apply(x, t, which), lambda x, t: x + t[which]):
        x, table = (t.clone().requires_grad_() for t in given)
        (add(x, table) * weight).sum().backward()
        found.append((x.grad, table.grad))
    for ours, plain in zip(*found):
        torch.testing.assert_close(ours, plain)
