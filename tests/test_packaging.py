"""What the package imports is what it declares, and a plain import stays cheap."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import simcse_weince

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "simcse_weince"


def declared(section: str) -> set[str]:
    """Distribution names of one list in pyproject.toml."""
    text = re.search(rf"^{section} = \[(.*?)\]$", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    return {re.match(r"[\w-]+", name).group().lower() for name in re.findall(r'"([^"]+)"', text.group(1))}


def imported() -> set[str]:
    """Distributions of the third-party modules that the package imports anywhere, also inside functions."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.add(node.module.split(".")[0])
    owners = packages_distributions()
    return {owners[name][0].lower() for name in modules - set(sys.stdlib_module_names) - {"simcse_weince"}}


def test_pk01_every_import_is_declared():
    assert imported() - declared("dependencies") == set()


def test_pk01_every_dependency_is_used_or_named_in_the_design():
    # accelerate is what the trainer and `accelerate launch` run on; it is imported by transformers.
    assert declared("dependencies") - imported() <= {"accelerate"}


def test_pk01_a_missing_extra_is_explained(tmp_path):
    """Without the packages of [wiki] a dump is refused with the command that installs them; text still trains."""
    (tmp_path / "dump.xml").write_text("<mediawiki></mediawiki>")
    (tmp_path / "text.txt").write_text("one\ntwo\n")
    program = (
        "import sys\n"
        "for name in ('mwparserfromhell', 'sentencex'): sys.modules[name] = None\n"
        "from simcse_weince.sentence.corpus import read_corpus\n"
        f"print(read_corpus(r'{tmp_path / 'text.txt'}', cache_dir=r'{tmp_path}').dataset['text'][:])\n"
        f"read_corpus(r'{tmp_path / 'dump.xml'}', cache_dir=r'{tmp_path}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "['one', 'two']" in done.stdout and done.returncode != 0
    assert "InputError" in done.stderr and "simcse-weince[wiki]" in done.stderr


def test_a_plain_import_loads_no_heavy_library():
    program = "import sys, simcse_weince; print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(set(simcse_weince.__all__)))
def test_public_names_are_there(name):
    assert getattr(simcse_weince, name) is not None


def test_type_checkers_see_every_public_name():
    """They do not run ``__getattr__``, to which every name would be of any type."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.asname: node.module for node in block.body for name in node.names}
    assert ast.unparse(block.test) == "TYPE_CHECKING" and seen == simcse_weince._PUBLIC


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = simcse_weince.nothing_here


def test_no_pickle_is_loaded_from_files():
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert "weights_only=False" not in text and "allow_pickle=True" not in text
        assert "torch.load(" not in text, f"{path.name}: use safetensors"
        assert not re.search(r"pickle\.loads?\(", text), path.name
        # The official CIFAR downloads are pickles: their one reader refuses all but arrays, lists and text.
        assert "import pickle" not in text or path.relative_to(PACKAGE).as_posix() == "vision/datasets.py"


def test_nothing_is_printed_by_the_package():
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(r"(?<![\w.])print\(", path.read_text()), path.name
