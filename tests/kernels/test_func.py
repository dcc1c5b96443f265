"""torch.func's transforms, and tensors without values: `chunked` against `reference` and against loops."""

from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap

from flash_lazy import lazy_attention, rule_attention

SETTINGS = [
    {},
    {"threshold": "per_token", "renormalise": True, "window": 5},
    {"threshold": "constant", "key_mask": torch.arange(9).expand(2, 9) > 1},
]


def leaves(threshold="per_query", copies=3, **_):
    """q, k, v, tau, bias and slopes of each copy, `[copies, ...]`: four heads that share two of keys."""
    noise = torch.Generator().manual_seed(0)
    tau = (4, 7) if threshold == "per_token" else (4,)
    shapes = [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), tau, (4, 6), (4,)]
    drawn = [torch.randn(copies, *shape, generator=noise, dtype=torch.float64) for shape in shapes]
    drawn[3] = 0.3 * drawn[3].abs()
    return tuple(drawn)


FORWARD = r"^this backend has no forward mode .*; choose backend='reference'$"


def attend(*x, backend="chunked", **settings):
    q, k, v, tau, bias, slopes = x
    out, stats = lazy_attention(q, k, v, tau, bias, slopes=slopes, backend=backend, return_stats=True, **settings)
    return out, stats.lse


def loss(*x, **settings):
    out, lse = attend(*x, **settings)
    return out.square().sum() + lse.sin().sum()


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shared", [(), (3, 4, 5), (0, 2), (1,)])
def test_mapped_calls_equal_a_loop(settings, shared):
    """Values, and gradients of each copy with respect to all leaves, also those that the copies share."""
    drawn = leaves(**settings)
    given = [x[0] if i in shared else x for i, x in enumerate(drawn)]
    dims = tuple(None if i in shared else 0 for i in range(6))
    slope = grad(partial(loss, **settings), argnums=tuple(range(6)))
    both = vmap(lambda *x: (attend(*x, **settings), slope(*x)), in_dims=dims)(*given)
    for copy in range(3):
        own = [x if i in shared else x[copy] for i, x in enumerate(given)]
        exact = attend(*own, **settings), slope(*own)
        for found, expected in zip(both[0] + both[1], exact[0] + exact[1], strict=True):
            torch.testing.assert_close(found[copy], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS)
def test_derivatives_equal_the_reference_s(settings):
    x = tuple(leaf[0] for leaf in leaves(**settings))
    for transform in (partial(grad, argnums=(0, 1, 2, 3, 4, 5)), partial(jacrev, argnums=(3, 4))):
        function = attend if transform.func is jacrev else loss
        ours, exact = (transform(partial(function, backend=b, **settings))(*x) for b in ("chunked", "reference"))
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-12)


def test_auto_takes_a_backend_that_torch_func_can_transform():
    x = tuple(leaf[0].float() for leaf in leaves())
    found = grad(partial(loss, backend="auto"))(*x)
    torch.testing.assert_close(found, grad(partial(loss, backend="reference"))(*x))
    with pytest.raises(ValueError, match=r"which torch\.func"):
        grad(partial(loss, backend="cpu"))(*x)


def test_the_reference_has_what_chunked_lacks():
    """Forward-mode and second derivatives; masks, lengths and boundaries that differ between copies."""
    x = tuple(leaf[0] for leaf in leaves())
    tau = lambda t, backend: loss(*x[:3], t, *x[4:], backend=backend)  # noqa: E731
    direction = torch.ones_like(x[3])
    _, along = jvp(partial(tau, backend="reference"), (x[3],), (direction,))
    torch.testing.assert_close(along, grad(partial(tau, backend="chunked"))(x[3]).sum())
    assert hessian(partial(tau, backend="reference"))(x[3]).shape == (4, 4)
    for transform in (lambda f: jvp(f, (x[3],), (direction,)), lambda f: hessian(f)(x[3])):
        with pytest.raises(NotImplementedError, match=FORWARD):
            transform(partial(tau, backend="chunked"))
    masks = torch.arange(9).expand(3, 2, 9) >= torch.arange(3)[:, None, None]
    masked = lambda mask, backend: attend(*x, key_mask=mask, backend=backend)[0]  # noqa: E731
    assert vmap(partial(masked, backend="reference"))(masks).shape == (3, *x[0].shape)
    with pytest.raises(ValueError, match="key_mask is mapped by vmap; share it"):
        vmap(partial(masked, backend="chunked"))(masks)


ONCE = r"^this backend has no second derivatives; choose backend='reference'$"
Q, *OTHERS = (leaf[0].float() for leaf in leaves())
TWICE = {
    **{backend: (partial(loss, backend=backend), OTHERS) for backend in ("chunked", "cpu")},
    "every leaf": (loss, [x.clone().requires_grad_() for x in OTHERS]),
    "a rule": (lambda q: rule_attention(lambda s, _: s.softmax(-1), q, q, q).square().sum(), []),
}


def differentiate_twice(f, x):
    """Ways to a second derivative of f; in the third it is a part of the gradient, which the rest would hide."""
    x = x.clone().requires_grad_()
    w = torch.eye(x.shape[-1], dtype=x.dtype, requires_grad=True)

    def penalise():
        (slope,) = torch.autograd.grad(f(x @ w), x, create_graph=True)
        slope.square().sum().backward()
        assert w.grad is not None
        return w.grad

    return [
        lambda: torch.autograd.functional.hessian(f, x.detach()),
        lambda: torch.autograd.functional.hvp(f, x.detach(), torch.ones_like(x))[1],
        penalise,
    ]


@pytest.mark.parametrize("name", TWICE)
def test_second_derivatives_are_refused(name):
    """They were 0, as torch's once_differentiable makes gradients constants."""
    function, others = TWICE[name]
    for second in differentiate_twice(lambda q: function(q, *others), Q):
        with pytest.raises(NotImplementedError, match=ONCE):
            second()


def test_the_reference_alone_has_second_derivatives():
    for second in differentiate_twice(lambda q: loss(q, *OTHERS, backend="reference"), Q):
        assert torch.as_tensor(second()).norm() > 1
    for way in (jacrev, lambda f: grad(lambda q: f(q).square().sum())):
        with pytest.raises(NotImplementedError, match=ONCE):
            way(lambda q: grad(loss)(q, *OTHERS, backend="chunked"))(Q)


def test_a_rule_names_the_backend_that_torch_func_can_transform():
    q = torch.randn(2, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))

    def loss_of_rule(x, backend="chunked"):
        return rule_attention(lambda scores, _: scores.softmax(-1), x, x, x, backend=backend).square().sum()

    for transformed in (
        lambda: grad(loss_of_rule)(q[0]),
        lambda: vmap(loss_of_rule)(q),
        lambda: jvp(loss_of_rule, (q[0],), (q[0],)),
    ):
        with pytest.raises(ValueError, match=r"^backend is 'chunked', which torch\.func .* rule; choose 'reference'$"):
            transformed()
    slope = vmap(grad(partial(loss_of_rule, backend="reference")))(q)
    x = q[0].requires_grad_()
    torch.testing.assert_close(slope[0], torch.autograd.grad(loss_of_rule(x), x)[0])


def test_a_dual_number_is_refused_with_the_way_out():
    q, tau = torch.randn(1, 2, 5, 8), torch.ones(2)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        for call in (lambda: lazy_attention(dual, q, q, tau), lambda: rule_attention(lambda s, _: s, dual, q, q)):
            with pytest.raises(NotImplementedError, match=FORWARD):
                call()


def test_lengths_may_be_mapped_or_without_values():
    q, k = torch.randn(2, 1, 2, 3, 8), torch.randn(1, 2, 9, 8)
    lengths, tau = torch.tensor([[7], [4]]), torch.ones(2)

    def attend_to(backend):
        return lambda q, lengths: lazy_attention(q, k, k, tau, kv_lengths=lengths, backend=backend)

    expected = torch.stack([attend_to("reference")(*pair) for pair in zip(q, lengths, strict=True)])
    torch.testing.assert_close(torch.vmap(attend_to("reference"))(q, lengths), expected)
    with pytest.raises(ValueError, match="kv_lengths is mapped by vmap; share it"):
        torch.vmap(attend_to("chunked"))(q, lengths)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert attend_to("chunked")(mode.from_tensor(q[0]), mode.from_tensor(lengths[0])).shape == q[0].shape


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])
def test_tensors_without_values_have_the_shapes_of_their_results(backend):
    x = tuple(leaf[0].float().to("meta").requires_grad_() for leaf in leaves())
    out, lse = attend(*x, backend=backend)
    assert (out.shape, out.device.type, lse.shape) == (x[0].shape, "meta", x[0].shape[:3])
    found = torch.autograd.grad(out.sum() + lse.sum(), x)
    assert [g.shape for g in found] == [leaf.shape for leaf in x]
