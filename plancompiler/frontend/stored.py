"""Values that lie in safetensors files: initial values of parameters, and constants that are too
large for a job's text.

An array that a program gives is written to a file once, named by its content, in the user's cache.
So a job holds a path and no numbers, every rank of a host maps the same pages, and a job that is
built again is the same job.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from plancompiler.errors import OutputError
from plancompiler.ir import DType, TensorType
from plancompiler.ir.arguments import absolute_path
from plancompiler.ir.user_cache import user_cache_folder
from plancompiler.ir.whole_file import UNFINISHED, write_whole
from plancompiler.ops.stored import stored_tensor
from plancompiler.plan.arrays import array_pieces

Array = np.ndarray[Any, np.dtype[Any]]

_KEY = "array"


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a safetensors file: `pc.data.Stored("model.safetensors", "norm.weight")`.

    As the `init` of a parameter it is its initial value; each rank reads the part that it holds.
    """

    path: str | PathLike[str]
    key: str

    @property
    def file(self) -> str:
        """The path, absolute: ranks may run elsewhere."""
        return os.path.normpath(absolute_path("a file of tensors", self.path))

    @property
    def type(self) -> TensorType:
        """Shape and dtype as the file has them; DataError where it cannot be read."""
        array = stored_tensor(self.file, self.key)
        return TensorType(array.shape, DType.parse(array.dtype))


def kept_array(array: Array) -> Stored:
    """The array in a file of the user's cache that is named by its content.

    OutputError where it cannot be written. `plancompiler cache clear --arrays` removes these files.
    """
    whole = np.ascontiguousarray(array).reshape(array.shape)
    digest = xxhash.xxh3_128()
    digest.update(f"{whole.dtype}{whole.shape}".encode())
    digest.update(whole.reshape(-1).view(np.uint8).data)
    path = arrays_folder() / f"{digest.hexdigest()}.safetensors"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            own = path.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
            write_whole(own, array_pieces({_KEY: whole}, {}))
            # A file that is there stays: ranks may be reading it.
            with contextlib.suppress(FileExistsError):
                os.link(own, path)
            own.unlink()
    except OSError as error:
        raise OutputError(
            "an array of a job cannot be written", got=f"{path}: {error.strerror or error}"
        ) from None
    return Stored(path, _KEY)


def arrays_folder() -> Path:
    """Where these files are; OutputError for an account without a home."""
    folder = user_cache_folder()
    if folder is None:
        raise OutputError(
            "there is no folder for arrays of a job",
            expected="a home folder, or XDG_CACHE_HOME",
            hint="write the arrays to a safetensors file and give pc.data.Stored(path, key)",
        )
    return folder / "arrays"


def clear_kept_arrays() -> tuple[int, int]:
    """Remove all these files; how many, and of how many bytes. A job that names one cannot start
    any more, until its program is run again.
    """
    count = nbytes = 0
    for file in sorted(arrays_folder().glob("*.safetensors")):
        nbytes += file.stat().st_size
        count += 1
        file.unlink()
    return count, nbytes
