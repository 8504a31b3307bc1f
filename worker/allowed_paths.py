"""The folders in which a worker reads and writes files that a job or a client names.

Whoever may submit jobs acts with the rights of the worker's user. What the operating system lets
that user do with files is more than a job needs, so paths of jobs are confined to folders that the
user chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from plancompiler.errors import SecurityError
from plancompiler.ir.arguments import absolute_path
from plancompiler.ops.registry import op_def
from plancompiler.plan.plan import ComputeSpec, Plan

_CONTROL = re.compile("[\0-\x1f\x7f-\x9f]")


class AllowedPaths:
    """Some folders and all that is below them."""

    def __init__(self, folders: Iterable[Path]) -> None:
        named = (absolute_path("an allowed folder", folder) for folder in folders)
        self._folders = tuple(folder.resolve() for folder in named)

    def check(self, path: str, what: str) -> None:
        """Raise SecurityError unless a path leads into one of the folders, links followed.

        `what` names its use: `the folder of a checkpoint`. A path with `..` or with control
        characters is refused wherever it leads.
        """
        if _CONTROL.search(path):
            raise self._refused(f"{what} has control characters in its name", path)
        if ".." in Path(path).parts:
            raise self._refused(f"{what} is named by way of `..`", path)
        try:
            place = Path(path).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise self._refused(f"{what} cannot be found", f"{path}: {error}") from error
        if not any(place.is_relative_to(folder) for folder in self._folders):
            raise self._refused(f"{what} lies outside of the folders that this worker allows", path)

    def check_folder(self, path: str, what: str) -> None:
        """The same of a folder whose files are read: none of them may be a link that leads out."""
        self.check(path, what)
        folder = Path(path)
        if folder.is_dir():
            for file in folder.iterdir():
                if file.is_symlink():
                    self.check(str(file), f"a file in {what}")

    def check_plan(self, plan: Plan) -> None:
        """The same of every file that a plan's ops read."""
        for task in plan.tasks:
            if isinstance(task.spec, ComputeSpec):
                named = op_def(task.spec.kind).files
                for name, value in task.spec.attrs if named else ():
                    if name in named:
                        for path in value if isinstance(value, tuple) else (value,):
                            self.check(str(path), f"a data file of {task.name}")

    def _refused(self, what: str, path: str) -> SecurityError:
        return SecurityError(
            what,
            got=repr(path),
            expected="a path below " + " or ".join(map(str, self._folders)),
            hint="start the worker with --allow-path FOLDER, or keep the files below those",
        )
