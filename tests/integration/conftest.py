"""What the tests with real processes share: the model, prompts, and the plain vLLM instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from memserve.models import BUNDLED_NAME, resolve_model
from tests.integration.reference import Reference
from tests.integration.texts import Texts


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The embedded model; converted first if that was never done."""
    folder = resolve_model(BUNDLED_NAME)
    assert isinstance(folder, Path)
    return folder


@pytest.fixture(scope="session")
def texts(model_folder: Path) -> Texts:
    return Texts(model_folder)


@pytest.fixture(scope="session")
def reference(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    plain = Reference(model_folder, tmp_path_factory.mktemp("reference") / "log")
    yield plain
    plain.close()
