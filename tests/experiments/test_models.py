import torch

from psgd.experiments.models import AffineLeNet5, LeNet5
from psgd.probes import generator


def test_lenet5_starts_as_in_the_paper():
    net = LeNet5(generator(0))
    weights = torch.cat([p.flatten() for p in net.parameters() if p.ndim > 1])
    assert abs(weights.std() - 0.1) < 0.001 and abs(weights.mean()) < 0.002
    assert all((p == 0).all() for p in net.parameters() if p.ndim == 1)
    assert sum(p.numel() for p in net.parameters()) == 44_426


def test_a_seed_is_a_start():
    one, two, other = LeNet5(generator(1)), LeNet5(generator(1)), LeNet5(generator(2))
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not torch.equal(one[0].weight, other[0].weight)


def test_the_affine_form_is_the_same_network():
    net, affine = LeNet5(generator(0)), AffineLeNet5(generator(1))
    layers = [m for m in net if hasattr(m, "weight")]
    with torch.no_grad():
        for layer, matrix in zip(layers, affine.layers, strict=True):
            layer.bias.normal_(generator=generator(2))
            matrix.copy_(torch.cat((layer.weight.flatten(1).mT, layer.bias[None])))
    x = torch.rand(3, 1, 28, 28, generator=generator(3))
    torch.testing.assert_close(affine(x), net(x))
    assert sum(p.numel() for p in affine.parameters()) == 44_426
