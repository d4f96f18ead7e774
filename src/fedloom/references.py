# SPDX-License-Identifier: Apache-2.0
"""``mypkg.mod:MyClass``: a class of an installed package, by the name that a recipe gives it.

Only what is installed here is imported: a package that came with an app is refused before any of
its code runs, since a node's owner chose the one and the coordinator the other.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from fedloom.errors import Refusal, nearest

Base = TypeVar("Base")

_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def check_reference(key: str, reference: str) -> None:
    """Refuse what is not ``module:Class``; empty stands for the method's own.

    >>> check_reference("strategy", "mypkg.mod:MyStrategy")
    """
    if reference and not _REFERENCE.fullmatch(reference):
        raise Refusal(
            f'{key} = "{reference}": expected module:Class of an installed package, for example'
            f' {key} = "mypkg.mod:My{key.title()}"'
        )


def named_class(
    key: str, reference: str, base: type[Base], pushed: Iterable[Path] = ()
) -> type[Base]:
    """Import a class and check that it is one of ``base``.

    Parameters
    ----------
    key
        The recipe key, for what is said if it cannot be had.
    reference
        ``module:Class``.
    base
        What it must be a subclass of.
    pushed
        Folders into which apps are unpacked: nothing is imported from below them.

    Raises
    ------
    Refusal
        If there is no such module or class here, it cannot be imported, or it is of another kind.
    """
    check_reference(key, reference)
    module_name, _, name = reference.partition(":")
    head = f'{key} = "{reference}"'
    module = _imported(head, module_name, [folder.resolve() for folder in pushed])
    try:
        found = getattr(module, name)
    except AttributeError:
        hint = nearest(name, [each for each in vars(module) if not each.startswith("_")])
        raise Refusal(f"{head}: {module_name} has no {name}{hint}") from None
    wanted = f"{base.__module__}.{base.__name__}"
    if not (inspect.isclass(found) and issubclass(found, base)):
        what = "a class" if inspect.isclass(found) else f"an object of {type(found).__name__}"
        raise Refusal(f"{head} is {what}: expected a subclass of {wanted}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise Refusal(f"{head} has no {missing[0]}: a subclass of {wanted} must define it")
    return found


def _imported(head: str, name: str, pushed: list[Path]) -> ModuleType:
    """Look where the package lies, which runs none of its code, then import the module."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__, and what was put into sys.modules by hand
        spec = None
    if spec is None:
        known = [each.name for each in pkgutil.iter_modules()]
        raise Refusal(f"{head}: no package {top} is installed here{nearest(top, known)}")
    places = [*(spec.submodule_search_locations or []), *filter(None, [spec.origin])]
    for place in (Path(each).resolve() for each in places):
        if any(place.is_relative_to(folder) for folder in pushed):
            raise Refusal(
                f"{head}: {top} came with the app and is not installed here; code that a"
                " coordinator sends is not run: install the package on this machine"
            )
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise Refusal(f"{head}: {_lacking(error.name)}") from error
        raise Refusal(f"{head} cannot be imported: {error}; install it here") from error
    except Exception as error:  # whatever a stranger's module does when it is imported
        said = str(error).partition("\n")[0]
        raise Refusal(f"{head} cannot be imported: {type(error).__name__}: {said}") from error


def _lacking(name: str) -> str:
    """Say which module is not there, with the nearest one beside it."""
    parent, _, last = name.rpartition(".")
    module = importlib.import_module(parent) if parent else None
    beside = [each.name for each in pkgutil.iter_modules(getattr(module, "__path__", []))]
    return f"{parent or 'Python'} has no module {last}{nearest(last, beside)}"
