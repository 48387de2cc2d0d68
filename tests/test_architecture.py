"""Who may import whom, and how long a file may be. ARCHITECTURE.md says why.

The tables below are the rules; the first tests apply them to the tree, the others show that each
kind of breach is seen. Imports count wherever they stand: in functions and under `TYPE_CHECKING`
too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# ── the rules ─────────────────────────────────────────────────────────────────────────────────
# A name stands for the module or package and all that is in it; the longest name that fits decides.

MAY_IMPORT: dict[str, str] = {
    # what everybody shares
    "types": "",
    "errors": "",
    "units": "",
    "frames": "errors",
    "run_dirs": "",
    "changes": "types",
    "messages": "changes errors types",
    # the pure core
    "core": "changes core errors messages types",
    "status": "core.timeline messages types",
    # configuration
    "config_layers": "errors",
    "engine_args": "errors",
    "config_values": "config_layers errors",
    "config": "config_layers config_values core.gpu_plan core.mode engine_args errors types",
    "config_text": "config",
    "loras": "errors types",
    "models": "errors types",
    "profiles": "config core.builtin core.profile errors models",
    "calibration": (
        "config core engine_args errors models profiles workers.environment workers.spec"
    ),
    # the orchestrator's parts
    "channel": "core errors frames messages types",
    "zygote_process": "errors types workers.spec",
    "audits": "core messages types",
    "cluster": "audits core errors messages status types workers.spec zygote_process",
    "accounting": "core messages status types",
    "active": "core types",
    "caches": "core messages types",
    "placing": "accounting active caches core scheduler_settings types",
    "scheduler": (
        "accounting active caches core errors frontend.service messages placing"
        " scheduler_settings status types"
    ),
    # the front end says in `service` what it needs of the others, and sees no more of them
    "frontend": "core.delivery core.vocabulary errors frontend messages types",
    "frontend.grammars": "errors workers.environment",
    "frontend.service": "core.delivery core.vocabulary errors status types",
    # what people see in a terminal: no more than a snapshot
    "progress": "types units",
    "status_client": "errors status",
    "tui_text": "messages progress status types units",
    "tui": "errors messages progress status status_client tui_text types units",
    # the workers: nothing of the orchestrator
    "ops": "errors ops types",
    "workers": "changes core errors frames messages ops run_dirs types workers",
    "workers.environment": "",
    "workers.spec": "core.cost_model errors frames messages types",
    "scheduler_settings": "caches config core types",
    # the scheduler over simulated instances: a worker's books, without its engine and its wires
    "simulator": (
        "changes config core errors messages profiles scheduler scheduler_settings simulator types"
        " units workers.index_reports workers.links.base workers.mempool workers.pools"
        " workers.records workers.transfer"
    ),
    # what joins them
    "worker_specs": (
        "config core.profile engine_args loras profiles types workers.environment workers.spec"
    ),
    "orchestrator": (
        "channel cluster config core errors frontend loras messages models profiles progress"
        " run_dirs scheduler scheduler_settings status tui types worker_specs workers.environment"
    ),
    "cli": (
        "calibration config config_text core.mode engine_args errors models orchestrator progress"
        " simulator.command status status_client tui tui_text types units"
    ),
    "__main__": "cli",
}

LIBRARIES: dict[str, str] = {
    "torch": "ops workers",
    "transformers": "workers",
    "vllm": "frontend.client frontend.grammars frontend.openai workers",
}
"""Library → who may import it."""

IMPORTED_BY_THE_ORCHESTRATOR = "workers.environment workers.spec"
"""The parts of `workers` that the orchestrator shares: none of LIBRARIES may be in them."""

CORE_LIBRARIES = "msgspec numpy"
IMPURE = (
    "asyncio concurrent datetime io logging multiprocessing os pathlib random secrets select"
    " selectors shutil signal socket subprocess sys tempfile threading time uuid"
)
"""What `core` may not import of the standard library: I/O, clocks, randomness, threads, logging."""

MAX_LINES = 450
LONGER_FILES: dict[str, str] = {
    "memserve/core/lifecycle.py": "one state machine, in the order of a request's life",
    "memserve/messages.py": "the whole control protocol, with its picture",
}
"""File → why it may be longer."""


# ── how they are applied ──────────────────────────────────────────────────────────────────────


def contains(names: str, module: str) -> bool:
    """Whether one of `names` is `module` or a package around it."""
    return any(module == name or module.startswith(f"{name}.") for name in names.split())


def governing(module: str) -> str | None:
    """The row of MAY_IMPORT that speaks of `module`."""
    return max((name for name in MAY_IMPORT if contains(name, module)), key=len, default=None)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that is imported, also through importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, "." * node.level + f"{node.module or ''}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            function, argument = node.func, node.args[0]
            name = getattr(function, "attr", getattr(function, "id", ""))
            if name in ("import_module", "__import__") and isinstance(argument, ast.Constant):
                yield node.lineno, str(argument.value)


def problem_with(module: str, imported: str) -> str | None:
    """Why `module` (without the leading `memserve.`) may not import `imported`."""
    if imported.startswith("."):
        return "imports are absolute"
    library = imported.partition(".")[0]
    if library == "memserve":
        return _problem_inside(module, imported.removeprefix("memserve").removeprefix("."))
    if contains("core", module):
        is_known = library in sys.stdlib_module_names or contains(CORE_LIBRARIES, library)
        if not is_known or contains(IMPURE, library):
            return "core is pure"
    allowed = LIBRARIES.get(library)
    if allowed is None:
        return None
    if contains(IMPORTED_BY_THE_ORCHESTRATOR, module):
        return f"the orchestrator imports {module}"
    return None if contains(allowed, module) else f"only {allowed} may"


def _problem_inside(module: str, imported: str) -> str | None:
    if imported == "__version__":
        return None
    row = governing(module)
    if row is None:
        return "give this module a row in MAY_IMPORT"
    allowed = MAY_IMPORT[row]
    return None if contains(allowed, imported) else f"{row} may import: {allowed or 'nothing'}"


def breaches(module: str, source: str) -> list[str]:
    """Every forbidden import of a module, as a line each."""
    found = []
    for line, imported in imports(ast.parse(source)):
        problem = problem_with(module, imported)
        if problem is not None:
            found.append(f"{module}:{line} imports {imported}: {problem}")
    return found


def module_name(path: Path) -> str:
    """`memserve/workers/links/shm.py` → `workers.links.shm`; a package is named by its folder."""
    parts = path.relative_to(ROOT / "memserve").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    return sorted((ROOT / "memserve").rglob("*.py"))


# ── the tree ──────────────────────────────────────────────────────────────────────────────────


def test_imports_follow_the_rules() -> None:
    paths = sources()
    assert len(paths) > 10
    found = [
        breach for path in paths for breach in breaches(module_name(path), path.read_text("utf-8"))
    ]
    assert not found, "\n" + "\n".join(found)


def test_every_module_has_a_row() -> None:
    names = [name for path in sources() if (name := module_name(path))]
    assert [name for name in names if governing(name) is None] == []


def test_every_row_has_a_module() -> None:
    names = [module_name(path) for path in sources()]
    rows = {*MAY_IMPORT, *(name for allowed in LIBRARIES.values() for name in allowed.split())}
    for allowed in MAY_IMPORT.values():
        rows.update(allowed.split())
    assert [row for row in sorted(rows) if not any(contains(row, name) for name in names)] == []


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT))
        for path in sources()
        if len(path.read_text("utf-8").splitlines()) > MAX_LINES
    }
    assert long <= set(LONGER_FILES), f"over {MAX_LINES} lines: split them, or say why not"
    assert set(LONGER_FILES) <= long, "no longer that long: drop the exception"


@pytest.mark.parametrize(
    "module", ["cli", "config", "models", "scheduler", "simulator.setup", "workers.spec"]
)
def test_the_orchestrator_starts_light(module: str) -> None:
    """What is imported before anything is served brings in no engine, by no detour."""
    heavy = "aiohttp torch transformers vllm"
    script = (
        f"import sys, memserve.{module}\n"
        f"print(*(name for name in {heavy.split()} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


# ── the rules can fail ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("module", "source", "why"),
    [
        ("core.policy", "import asyncio", "core is pure"),
        ("core.policy", "from time import monotonic", "core is pure"),
        ("core.policy", "import aiohttp", "core is pure"),
        ("core.policy", "from numpy import random\nimport os.path", "core is pure"),
        ("core.policy", "from memserve.status import Snapshot", "core may import"),
        ("core.policy", "from memserve import scheduler", "core may import"),
        ("types", "from memserve.errors import ConfigError", "types may import: nothing"),
        ("scheduler", "import torch", "only ops workers may"),
        ("scheduler", "def f():\n    import torch.cuda", "only ops workers may"),
        ("scheduler", "if TYPE_CHECKING:\n    from torch import Tensor", "only ops workers may"),
        ("scheduler", "importlib.import_module('vllm.config')", "only frontend.client"),
        ("scheduler", "from memserve.workers.mempool import MemPool", "scheduler may import"),
        ("frontend.app", "from vllm import SamplingParams", "only frontend.client"),
        ("frontend.app", "from memserve.cluster import ClusterManager", "frontend may import"),
        ("frontend.openai", "from memserve import channel", "frontend may import"),
        ("frontend.app", "from memserve import scheduler", "frontend may import"),
        ("tui", "from memserve.scheduler import GlobalScheduler", "tui may import"),
        ("workers.main", "from memserve.scheduler import GlobalScheduler", "workers may import"),
        ("workers.main", "import memserve.frontend.openai", "workers may import"),
        ("workers.links.shm", "from memserve.tui import render", "workers may import"),
        ("workers.spec", "import torch", "the orchestrator imports workers.spec"),
        ("workers.spec", "from memserve.workers import compat", "workers.spec may import"),
        ("cluster", "import memserve.workers", "cluster may import"),
        ("cluster", "from memserve.workers.spec_of_another import x", "cluster may import"),
        ("unheard_of", "from memserve.types import BlockId", "give this module a row"),
        ("core.policy", "from . import radix", "imports are absolute"),
    ],
)
def test_a_breach_is_seen(module: str, source: str, why: str) -> None:
    found = breaches(module, source)
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("core.policy", "import bisect\nimport msgspec\nimport numpy as np"),
        ("core.policy", "from memserve.core import radix\nfrom memserve.types import BlockId"),
        ("workers.links.shm", "import torch\nimport vllm.config\nfrom memserve.ops import blocks"),
        ("frontend.openai", "from vllm import SamplingParams"),
        ("cluster", "from memserve.workers.spec import Fork\nfrom memserve.workers import spec"),
        ("cli", "from memserve import __version__"),
        ("tui", "import rich\nfrom memserve.status import Snapshot"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(module, source) == []
