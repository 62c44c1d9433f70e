"""Make calls of a package with the API of ``kernels`` and print their outcomes as JSON.

    python -m peer.calls PACKAGE online|offline FACTS

The outcome of a call is its value, or what built-in exceptions a caller can catch it as. Runs on the interpreter of
either package: nothing of kernelhub, and nothing but Torch, is imported here.
"""

from __future__ import annotations

import builtins
import importlib
import json
import logging
import sys
from typing import Any

PARTS = {"online": ("loading_calls", "value_calls", "layer_calls"), "offline": ("offline_calls",)}


def main(package: str, part: str, facts: dict[str, Any]) -> None:
    logging.disable(logging.CRITICAL)
    api = importlib.import_module(package)
    modules = {name: importlib.import_module(f"peer.{name}") for name in PARTS[part]}
    calls = {f"{of}.{name}": call for of, module in modules.items() for name, call in module.CALLS.items()}
    json.dump({name: outcome(call, api, facts) for name, call in calls.items()}, sys.stdout, indent=1, sort_keys=True)


def outcome(call: Any, api: Any, facts: dict[str, Any]) -> Any:
    """The value of a call, or the built-in classes of the exception that it raises, the nearest first."""
    try:
        return call(api, facts)
    except Exception as error:
        return {"raises": [cls.__name__ for cls in type(error).__mro__ if cls.__module__ == builtins.__name__][:-3]}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
