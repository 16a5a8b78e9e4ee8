"""Collected only where asked for (`-m frameworks`): importing the frameworks takes longer than most tests."""

import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_ignore_collect(config):
    return True if "not frameworks" in config.option.markexpr else None


@pytest.fixture(autouse=True)
def forget():
    """Forget accelerate's singletons, which would carry the precision of one test into the next."""

    def reset():
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()

    yield reset
    reset()
