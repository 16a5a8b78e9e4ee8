"""Learning rates: numbers, tensors, and every scheduler of torch."""

import inspect

import pytest
import torch
from torch.optim import lr_scheduler
from toys import mlp, same, train

from psgd import PSGD, whiten

ARGUMENTS = {
    "LambdaLR": {"lr_lambda": lambda t: 0.5**t},
    "MultiplicativeLR": {"lr_lambda": lambda t: 0.5},
    "StepLR": {"step_size": 1},
    "MultiStepLR": {"milestones": [1, 2]},
    "ConstantLR": {},
    "LinearLR": {},
    "ExponentialLR": {"gamma": 0.5},
    "PolynomialLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 4},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.01, "step_size_up": 2, "cycle_momentum": True},
    "OneCycleLR": {"max_lr": 0.01, "total_steps": 10, "cycle_momentum": True},
    "ReduceLROnPlateau": {"patience": 0},
}
COMPOSED = {"SequentialLR", "ChainedScheduler"}


def test_every_scheduler_of_torch_is_tried():
    public = {
        name
        for name, x in vars(lr_scheduler).items()
        if inspect.isclass(x) and issubclass(x, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert public - {"LRScheduler"} == ARGUMENTS.keys() | COMPOSED


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_scheduler_changes_the_steps(name):
    model, still = mlp(), mlp()
    opt = PSGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = getattr(lr_scheduler, name)(opt, **ARGUMENTS[name])
    seen = set()
    for _ in range(4):
        train(opt, model, 1)
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        seen.add((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
    assert len(seen) > 1 or name == "ConstantLR"
    unscheduled = PSGD(still.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        train(unscheduled, still, 1)
    assert not same(list(model.parameters()), list(still.parameters()))


def test_composed_schedulers():
    opt = PSGD(mlp().parameters(), lr=0.01)
    parts = [lr_scheduler.ConstantLR(opt), lr_scheduler.ExponentialLR(opt, 0.5)]
    for scheduler in (lr_scheduler.SequentialLR(opt, parts, [2]), lr_scheduler.ChainedScheduler(parts)):
        opt.step()
        scheduler.step()
    assert opt.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize("lr", [torch.tensor(0.02), torch.tensor([0.02])], ids=["0-d", "1-element"])
def test_a_tensor_is_as_good_as_a_number(lr):
    model, twin = mlp(), mlp()
    train(PSGD(model.parameters(), lr=lr, weight_decay=0.1), model, 5)
    train(PSGD(twin.parameters(), lr=0.02, weight_decay=0.1), twin, 5)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


def test_a_learning_rate_of_zero_moves_nothing():
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    train(PSGD(model.parameters(), lr=0.0, weight_decay=0.1, curvature=whiten), model, 3, closure=False)
    assert same(before, [p.detach() for p in model.parameters()])
