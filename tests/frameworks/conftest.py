"""Collected only where asked for (`-m frameworks`): importing the frameworks takes longer than most tests."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_ignore_collect(config):
    return True if "not frameworks" in config.option.markexpr else None
