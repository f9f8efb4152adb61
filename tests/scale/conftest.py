"""Ray on two cores for the tests of this folder, and a tiny model that its workers can load."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models import smollm2_tokenizer, tiny_model

_OBJECT_STORE_BYTES = 200_000_000


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Start Ray where it is installed, and stop it after a module: others start one of their own."""
    module = pytest.importorskip("ray", reason="Ray is not installed: make test-ray installs it")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Workers unpickle what the tests define.
    tests = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
    with warnings.catch_warnings():
        # Ray's own about its next release.
        warnings.simplefilter("ignore")
        module.init(
            num_cpus=2,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
    try:
        yield module
    finally:
        module.shutdown()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    smollm2_tokenizer().save_pretrained(folder)
    return folder
