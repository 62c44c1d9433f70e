"""Marks: apply the kernel decorators of modelling files that were imported when the decorators did nothing.

transformers marks layers and functions while a modelling file is imported. What the file says is read from its source,
and the same expressions are evaluated in its namespace again, functions first: the decorators of classes take them.
"""

from __future__ import annotations

import ast
import inspect
import logging
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub.integrations.transformers.references import KERNELS, replace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from types import ModuleType

_PREFIX = "use_kernel"  # of every decorator, in every release
_QUESTION = "is_kernels_available"

_logger = logging.getLogger("kernelhub")


class _Marked(NamedTuple):
    """One definition with kernel decorators, the innermost first."""

    module: ModuleType
    name: str
    decorators: tuple[ast.expr, ...]

    @property
    def value(self) -> Any:
        return vars(self.module).get(self.name)

    def decorated(self) -> Any:
        value = self.value
        for expression in self.decorators:
            value = _evaluate(expression, self.module)(value)
        return value


def apply(undo: ExitStack) -> None:
    """Do in every loaded file of transformers what its import would do now; ``undo`` takes it back."""
    trees = list(_trees())
    for module, tree in trees:
        _run_conditions(module, tree, undo)
    found = [marked for module, tree in trees for marked in _marked(module, tree)]
    functions = [each for each in found if inspect.isfunction(each.value)]
    replaced = {id(each.value): each.decorated() for each in functions}
    for names, key, old in replace(replaced):
        undo.callback(names.__setitem__, key, old)
    for each in found:
        if inspect.isclass(each.value):
            _mark_class(each, undo)


def _trees() -> Iterator[tuple[ModuleType, ast.Module]]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers" and name != KERNELS and _concerned(module):
            try:
                source = inspect.getsource(module)
            except (OSError, TypeError) as error:  # its layers are found by other means
                _logger.debug("the marks of %s cannot be read: %s", name, error)
                continue
            if f"\n@{_PREFIX}" in source or f"\nif {_QUESTION}(" in source:
                yield module, ast.parse(source)


def _concerned(module: ModuleType) -> bool:
    return any(name.startswith(_PREFIX) or name == _QUESTION for name in vars(module))


def _marked(module: ModuleType, tree: ast.Module) -> Iterator[_Marked]:
    for statement in tree.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            decorators = [each for each in reversed(statement.decorator_list) if _is_mark(each, module)]
            if decorators:
                yield _Marked(module, statement.name, tuple(decorators))


def _is_mark(expression: ast.expr, module: ModuleType) -> bool:
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return False
    function = vars(module).get(expression.func.id)
    return expression.func.id.startswith(_PREFIX) and getattr(function, "__module__", None) == KERNELS


def _run_conditions(module: ModuleType, tree: ast.Module, undo: ExitStack) -> None:
    """Run what a file does at its top level if `kernels` is there."""
    for statement in tree.body:
        test = statement.test if isinstance(statement, ast.If) else None
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == _QUESTION:
            before = dict(vars(module))
            exec(compile(ast.Module([statement], []), str(module.__file__), "exec"), vars(module))
            undo.callback(_restore_names, vars(module), before, vars(module).keys() - before.keys())


def _restore_names(names: dict[str, Any], before: dict[str, Any], added: set[str]) -> None:
    for name in added:
        names.pop(name, None)
    names.update({name: value for name, value in before.items() if names.get(name) is not value})


def _mark_class(marked: _Marked, undo: ExitStack) -> None:
    cls = marked.value
    before = dict(vars(cls))
    marked.decorated()
    for name, value in list(vars(cls).items()):
        if name not in before:
            undo.callback(delattr, cls, name)
        elif before[name] is not value:
            undo.callback(setattr, cls, name, before[name])


def _evaluate(expression: ast.expr, module: ModuleType) -> Any:
    return eval(compile(ast.Expression(expression), str(module.__file__), "eval"), vars(module))
