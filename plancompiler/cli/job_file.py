"""Job files: a Python file with `build(**config) -> Job`, or the text of a job."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from plancompiler.errors import JobFileError, PlanCompilerError, UsageError
from plancompiler.frontend.trace import as_job
from plancompiler.importers import model_job
from plancompiler.ir import Job, verify_job
from plancompiler.ir.arguments import is_file
from plancompiler.ir.job_parser import parse_job
from plancompiler.ops.verify_types import verify_types
from plancompiler.plan.compiled_plans import MODEL_FILE

DEFAULT_FUNCTION = "build"
TEXT_SUFFIX = ".txt"
"""Of files that hold a job's text, as `str(job)` and `PLANCOMPILER_DUMP` write it."""


def load_job(target: str, config: Mapping[str, Any], ranks: int | None = None) -> Job:
    """The job that `FILE[:FUNCTION]` builds from `config`, or that a `.txt` file holds as text, or
    that of an imported model in a folder.

    The file is loaded under a private name with its folder first on the import path, as if it were
    run as a script. A function with a parameter `ranks` is given the number of ranks asked for.
    """
    if is_model_folder(target):
        arguments = _arguments(model_job.build, "a model's job", Path(target), config, ranks, 1)
        return model_job.build(Path(target).resolve(), **arguments)
    path, name = split_target(target)
    if path.suffix == TEXT_SUFFIX:
        return _read_text(path, name, config)
    built = call_of_file(target, DEFAULT_FUNCTION, config, ranks)
    if not isinstance(built, Job):
        raise JobFileError(
            f"{name} did not return a job",
            source=path,
            got=type(built).__name__,
            expected="what `with pc.job(...) as job:` yields",
            hint=f"end {name} with `return job`, after the block",
        )
    try:
        return as_job(built)
    except PlanCompilerError as error:
        raise error.at(source=path) from None


def call_of_file(
    target: str, default: str, config: Mapping[str, Any], ranks: int | None = None
) -> Any:
    """What the function of `FILE[:FUNCTION]` returns for `config`; without one, that of `default`.

    JobFileError where there is no such function, or it raises.
    """
    path, name = split_target(target, default)
    with job_folder_on_path(path):
        module = _load_module(path)
        function = getattr(module, name, None)
        if not callable(function):
            raise JobFileError(
                f"the job file has no function {name!r}",
                source=path,
                got="functions " + (", ".join(_functions_of(module)) or "(none)"),
                expected=f"def {name}(**config)"
                + (" -> plancompiler.Job" if default == DEFAULT_FUNCTION else ""),
                hint=f"add {name}, or name another function: {path.name}:FUNCTION",
            )
        arguments = _arguments(function, name, path, config, ranks)
        try:
            return function(**arguments)
        except PlanCompilerError:
            raise
        except Exception as error:
            raise JobFileError(
                f"{name} raised {type(error).__name__}",
                source=_place_of(error, path),
                got=str(error) or type(error).__name__,
                hint="set PLANCOMPILER_LOG=debug to see the traceback",
            ) from error


def is_model_folder(target: str) -> bool:
    """Whether what a command was given is the folder of an imported model."""
    return is_file(Path(target) / MODEL_FILE)


def _read_text(path: Path, name: str, config: Mapping[str, Any]) -> Job:
    if config or name != DEFAULT_FUNCTION:
        raise UsageError(
            "a job that is given as text has no function and no settings",
            source=path,
            got=f":{name}" if name != DEFAULT_FUNCTION else f"-D {', -D '.join(config)}",
            expected=f"a file that ends in {TEXT_SUFFIX}, alone",
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError("the job file cannot be read", source=path, got=str(error)) from None
    job = parse_job(text, path.name)
    verify_job(job)
    verify_types(job)
    return job


def split_target(target: str, default: str = DEFAULT_FUNCTION) -> tuple[Path, str]:
    """`FILE[:FUNCTION]` as the file's path and the function's name."""
    file, colon, function = target.rpartition(":")
    if not colon or os.sep in function or not file:
        file, function = target, default
    if not function.isidentifier():
        raise UsageError("what follows the colon must be a function's name", got=repr(target))
    path = Path(file)
    if not is_file(path):
        raise JobFileError(
            "the job file does not exist" if not path.exists() else "the job file is not a file",
            got=str(path),
            expected=f"a Python file with a function {function}(**config), or a job's text in a "
            f"{TEXT_SUFFIX} file",
        )
    return path.resolve(), function


@contextmanager
def job_folder_on_path(target: str | Path) -> Iterator[None]:
    """Within the block, the folder of `FILE[:FUNCTION]`, or of a file, is first on the import path;
    of an imported model's folder nothing is imported.
    """
    if isinstance(target, str) and is_model_folder(target):
        yield
        return
    file = target if isinstance(target, Path) else split_target(target)[0]
    entry = str(file.parent)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def _load_module(path: Path) -> ModuleType:
    name = f"_plancompiler_job_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobFileError("the job file is not Python", got=str(path), expected="a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    try:
        spec.loader.exec_module(module)
    except PlanCompilerError:
        raise
    except Exception as error:
        raise JobFileError(
            f"the job file does not load: {type(error).__name__}",
            source=_place_of(error, path),
            got=str(error) or type(error).__name__,
            hint="set PLANCOMPILER_LOG=debug to see the traceback",
        ) from error
    return module


def _place_of(error: Exception, path: Path) -> str:
    """The last line of the job file that the error went through, else the file."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _functions_of(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]


def _arguments(
    function: Callable[..., Any],
    name: str,
    path: Path,
    config: Mapping[str, Any],
    ranks: int | None,
    given: int = 0,
) -> dict[str, Any]:
    """The arguments of a function besides the first ones, which are given."""
    signature = inspect.signature(function)
    own = list(signature.parameters.values())[given:]
    signature = signature.replace(parameters=own)
    arguments = dict(config)
    if "ranks" in signature.parameters and "ranks" not in arguments:
        arguments["ranks"] = ranks
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise UsageError(
            f"{name} does not accept these settings",
            source=path,
            got=f"{', '.join(f'-D {key}={value}' for key, value in config.items()) or 'no -D'} "
            f"({error})",
            expected=f"{name}{signature}",
        ) from None
    return arguments
