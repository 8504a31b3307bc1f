"""The names that users of NumPy and PyTorch know, as a file of data for a test.

    python -m tests.suites.names_of_others

writes `names_of_others.txt` where both are installed: a line for each namespace, with its public
functions, classes and methods.
"""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

FILE = Path(__file__).with_suffix(".txt")


def public(namespace: object) -> list[str]:
    """Functions and classes by name, without modules, constants and what begins with `_`."""
    names = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in dir(namespace):
            value = getattr(namespace, name, None)
            # PyTorch shows names of its compiler, of typing and of kernels of single devices.
            internal = re.match(
                "_|sym_|cudnn_|miopen_|mkldnn_|fbgemm_|q_|typename|profiler_|handle_torch|has_torch"
                "|boolean_dispatch|assert_int|Callable|Optional|factory_kwargs|LinearCrossEntropyOpt",
                name,
            )
            classes_of_a_compiler = inspect.isclass(value) and namespace.__name__ == "torch"
            if internal is None and not classes_of_a_compiler and callable(value):
                names.append(name)
    return names


def main() -> None:
    """Write the file."""
    import numpy as np
    import torch

    namespaces = {
        "numpy": np,
        "numpy.ndarray": np.ndarray,
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn": torch.nn,
        "torch.nn.functional": torch.nn.functional,
    }
    lines = [f"{title}: {' '.join(public(each))}\n" for title, each in namespaces.items()]
    FILE.write_text("".join(lines))


def names() -> dict[str, list[str]]:
    """What the file says: names by namespace."""
    lines = FILE.read_text().splitlines()
    return {title: rest.split() for title, _, rest in (line.partition(": ") for line in lines)}


if __name__ == "__main__":
    main()
