"""What the package as a whole promises: cheap imports, its public names, and which module may import which."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kernelhub

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(kernelhub.__file__).parent
HEAVY = ("torch", "transformers", "huggingface_hub")

# Lowest first: a module imports from lines above its own only. A package counts as one module.
ORDER = """
    errors
    archive backend buildpath document durable elf identity mode parallel pythondepend
    reporter revision setting tomltext
    capability fusion index liger lease machine manifest mutex request retry trustroot variant
    entry environment folder lockfile metadata override policy project redirect repository_folder signer transfer
    compatibility history host hub_routes mapping operators rootupdate store trust
    config hub preflight recorded resolution serve verify
    preflightrecord source
    package
    assortment explanation fetch hfcache inventory loader locked provenance suggestion
    acceptance firstuse
    layers session
    checking
    api blueprint bundle prefetch
    integrations
    cli
    __main__
"""
RANKS = {name: rank for rank, line in enumerate(ORDER.split("\n")) for name in line.split()}

# Third-party packages and the only places that may import them.
HOMES = {
    "torch": ("machine", "layers", "checking", "integrations"),
    "huggingface_hub": ("hub",),
    "elftools": ("elf",),
    "filelock": ("mutex",),
    "sigstore": ("signer",),
    "cryptography": ("signer",),
    "tuf": ("rootupdate",),
    "starlette": ("serve", "hub_routes"),
    "uvicorn": ("serve", "hub_routes"),
    "transformers": ("integrations",),
    "lightning": ("integrations",),
    "pytorch_lightning": ("integrations",),
    "matplotlib": ("checking",),
    "typer": ("cli",),
    "rich": ("cli",),
}
# By name, when the demo runs or a model is looked through: `kernelhub --help` must not pay for them.
BY_NAME = {"torch": ("machine", "cli", "blueprint"), "transformers": ("integrations", "cli", "blueprint")}

# Documented by torch, which has no other home for them.
NO_PUBLIC_HOME = {"torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._pytree.tree_leaves"}

FILES = sorted(path for path in ROOT.rglob("*.py") if "collection" not in path.relative_to(ROOT).parts[:1])


def run(code: str) -> str:
    """What a fresh Python prints after ``code``."""
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


# Importing stays cheap

HELP = """
import sys
from kernelhub.cli import main
sys.argv = ["kernelhub", {arguments}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
LOADED = f"\nprint('loaded:', [name for name in {HEAVY} if name in __import__('sys').modules])"


@pytest.mark.parametrize(
    "code",
    [
        "import kernelhub",
        "import kernelhub; dir(kernelhub); kernelhub.__version__",
        "from kernelhub import KernelConfig; KernelConfig({'RMSNorm': 'org/repo@v1:Norm'})",
        "from kernelhub import Environment, KernelRequest, Mode, KernelHubError",
        "from kernelhub import Session, load_kernel, kernelize",
        HELP.format(arguments="'--help'"),
        HELP.format(arguments="'prefetch', '--help'"),
        HELP.format(arguments="'demo', '--help'"),
    ],
)
def test_importing_and_helping_load_none_of_the_heavy_packages(code: str) -> None:
    """REF huggingface/transformers#46291, sgl-project/sglang#26704: building a mapping failed at import."""
    assert run(code + LOADED).endswith("loaded: []\n")


def test_without_lightning_its_callback_says_what_to_install() -> None:
    code = "import sys\nsys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
    code += "try:\n    import kernelhub.integrations.lightning\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert run(code) == "KernelCallback needs Lightning: pip install lightning\n"


def test_without_torch_and_transformers_the_package_and_its_help_work() -> None:
    """REF linkedin/Liger-Kernel#569, #258, #270: an "optional" package was imported at the top."""
    blocked = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
    assert "prefetch" in run(blocked + HELP.format(arguments="'--help'"))


# Public names


def test_the_public_names_are_sorted_and_importable() -> None:
    assert kernelhub.__all__ == sorted(kernelhub.__all__)
    assert dir(kernelhub) == kernelhub.__all__
    for name in kernelhub.__all__:
        assert getattr(kernelhub, name) is not None


def test_the_public_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted([*seen, "__version__"]) == kernelhub.__all__
    for name, module in seen.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(kernelhub, name)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kernelhub' has no attribute 'nothing'"):
        _ = kernelhub.nothing


def test_the_package_tells_its_version() -> None:
    """REF modelscope/ms-swift#6679."""
    assert re.fullmatch(r"[0-9]+\.[0-9]+\.[0-9]+(\.dev[0-9]+)?", kernelhub.__version__)


# Which module may import which


def home(path: Path) -> str:
    """The module or top-level package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(node: ast.AST) -> Iterator[str]:
    """Dotted names that are imported when the code runs; imports for type checkers only do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            for statement in child.orelse:
                yield from imports(statement)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child)


def named_imports(tree: ast.AST) -> Iterator[str]:
    """Modules that are imported by name: ``import_module("torch")``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_up_the_list_only(path: Path) -> None:
    here = home(path)
    if here == "__init__":
        assert not [name for name in imports(parsed(path)) if name.startswith("kernelhub")]
        return
    assert here in RANKS, f"{here} has no place in the order of modules yet"
    tree = parsed(path)
    for name in [*imports(tree), *named_imports(tree)]:
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "kernelhub" and target and target not in (here, *kernelhub.__all__):
            assert target in RANKS, name
            assert RANKS[target] < RANKS[here], f"{here} may not import {target}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_third_party_package_is_imported_in_its_home_only(path: Path) -> None:
    tree = parsed(path)
    for name in imports(tree):
        top = name.partition(".")[0]
        if top in HOMES:
            assert home(path) in HOMES[top], f"{home(path)} may not import {top}"
    for name in named_imports(tree):
        top = name.partition(".")[0]
        if top in HOMES:
            assert home(path) in BY_NAME.get(top, HOMES[top]), f"{home(path)} may not import {top} by name"


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Private modules and names of other packages that the code imports or reaches through a module of theirs."""
    theirs: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            theirs |= {(alias.asname or alias.name).partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            theirs |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    known = {"kernelhub", *sys.stdlib_module_names}
    theirs = {alias: name for alias, name in theirs.items() if name.partition(".")[0] not in known}
    yield from (name for name in theirs.values() if any(part.startswith("_") for part in name.split(".")))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            root = ast.unparse(node.value)
            if root.partition(".")[0] in theirs:
                yield f"{root}.{node.attr}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_another_package_is_used(path: Path) -> None:
    """REF huggingface/trl#3480; axolotl-ai-cloud/axolotl#2767; linkedin/Liger-Kernel#960, #1044: a release broke it."""
    assert sorted(set(private_uses(parsed(path))) - NO_PUBLIC_HOME) == []


def test_no_import_is_relative() -> None:
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    needs = {
        path: {name for name in imports(parsed(path)) if name.startswith("kernelhub.")}
        for path in FILES
        if path.name != "__init__.py"
    }
    modules = {".".join(("kernelhub", *path.relative_to(ROOT).with_suffix("").parts)): path for path in needs}
    edges = {
        name: {other for other in modules for need in needs[path] if f"{need}.".startswith(f"{other}.")} - {name}
        for name, path in modules.items()
    }
    while ready := {name for name, others in edges.items() if not others & edges.keys()}:
        for name in ready:
            del edges[name]
    assert not edges
