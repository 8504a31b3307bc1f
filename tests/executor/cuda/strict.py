"""Arrays that refuse what CuPy refuses, on NumPy's memory.

A kernel that runs on these asks nothing of a device's arrays that CuPy 14 would not do: functions
reach them by NEP 13 and 18 only, with the parameters that CuPy has; arrays of the host do not mix
with them; numbers are not read from them, as the host would have to wait.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "append": ("arr", "values", "axis"),
    "argmax": ("a", "axis", "dtype", "out", "keepdims"),
    "argmin": ("a", "axis", "dtype", "out", "keepdims"),
    "argsort": ("a", "axis", "kind"),
    "ascontiguousarray": ("a", "dtype"),
    "bincount": ("x", "weights", "minlength"),
    "broadcast_to": ("array", "shape"),
    "clip": ("a", "a_min", "a_max", "out"),
    "concatenate": ("arrays", "axis", "out", "dtype", "casting"),
    "copyto": ("dst", "src", "casting", "where"),
    "diff": ("a", "n", "axis", "prepend", "append"),
    "dot": ("a", "b", "out"),
    "einsum": ("operands", "optimize", "dtype"),
    "empty_like": ("prototype", "dtype", "order", "subok", "shape"),
    "flatnonzero": ("a",),
    "flip": ("a", "axis"),
    "isin": ("element", "test_elements", "assume_unique", "invert"),
    "isclose": ("a", "b", "rtol", "atol", "equal_nan"),
    "linalg.cholesky": ("a",),
    "linalg.det": ("a",),
    "linalg.eigh": ("a", "UPLO"),
    "linalg.inv": ("a",),
    "linalg.qr": ("a", "mode"),
    "linalg.slogdet": ("a",),
    "linalg.solve": ("a", "b"),
    "linalg.svd": ("a", "full_matrices", "compute_uv"),
    "may_share_memory": ("a", "b", "max_work"),
    "moveaxis": ("a", "source", "destination"),
    "nonzero": ("a",),
    "outer": ("a", "b", "out"),
    "partition": ("a", "kth", "axis"),
    "searchsorted": ("a", "v", "side", "sorter"),
    "stack": ("arrays", "axis", "out", "dtype", "casting"),
    "take": ("a", "indices", "axis", "out"),
    "take_along_axis": ("a", "indices", "axis"),
    "unique": ("ar", "return_index", "return_inverse", "return_counts", "axis", "equal_nan"),
    "where": ("condition", "x", "y"),
    "zeros_like": ("a", "dtype", "order", "subok", "shape"),
}
"""Functions of CuPy 14.2 that kernels use, with their parameters."""
ASKED: set[tuple[str, str, tuple[str, ...], str]] = set()
"""Ufuncs that were called: name, method, dtypes of arrays among the inputs, dtype of `out`."""
_CREATION = {"arange", "empty", "full", "ones", "zeros"}
_REDUCING = {"add", "multiply"}
_SCATTERING = {
    "add": {"int32", "uint32", "uint64", "float16", "float32", "float64"},
    "maximum": {"int32", "uint32", "uint64", "float32", "float64"},
    "minimum": {"int32", "uint32", "uint64", "float32", "float64"},
}
"""Ufuncs with `at`, and the dtypes that CUDA's atomic operations give them."""


class StrictArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A device's array, as far as kernels may know."""

    def __init__(self, host: np.ndarray, base: StrictArray | None = None) -> None:
        self.host = np.asarray(host)
        if not self.host.dtype.isnative:
            raise ValueError(f"Unsupported dtype {self.host.dtype.str}")
        self.base = base
        """Who owns the memory, where it is another array."""

    dtype = property(lambda self: self.host.dtype)
    shape = property(lambda self: self.host.shape)
    ndim = property(lambda self: self.host.ndim)
    size = property(lambda self: self.host.size)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    # Of empty arrays CuPy's are zeros.
    strides = property(lambda self: self.host.strides if self.size else (0,) * self.ndim)
    flags = property(lambda self: SimpleNamespace(c_contiguous=self.host.flags.c_contiguous))
    T = property(lambda self: self._view(self.host.T))

    def _view(self, view: Any) -> Any:
        """What a method gives, which may share this array's memory."""
        if isinstance(view, np.ndarray) and np.may_share_memory(view, self.host):
            return StrictArray(view, self if self.base is None else self.base)
        return _device(view)

    @property
    def data(self) -> SimpleNamespace:
        return SimpleNamespace(ptr=self.host.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.host.ctypes.data, False)}

    def __len__(self) -> int:
        return len(self.host)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __bool__(self) -> bool:
        raise TypeError("the host would have to wait for the device")

    __int__ = __float__ = __index__ = __iter__ = __bool__  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        out = kwargs.pop("out", ())
        if len(out) > 1:
            raise ValueError("The 'out' parameter must have exactly one array value")
        if method == "__call__":
            allowed = {"dtype", "casting"}
        elif method in ("reduce", "accumulate"):
            allowed = {"axis", "dtype", "keepdims"}
            if name not in _REDUCING:
                raise NotImplementedError(f"`{name}.{method}` is not supported yet")
        elif method == "at" and name in _SCATTERING:
            allowed = set()
            if str(inputs[0].dtype) not in _SCATTERING[name]:
                raise TypeError(f"scatter of {name} does not support {inputs[0].dtype}")
        else:
            raise NotImplementedError(f"`{name}.{method}` is not supported yet")
        if not kwargs.keys() <= allowed:
            raise TypeError(f"Wrong arguments {kwargs}")
        of_inputs = tuple(str(each.dtype) for each in inputs if isinstance(each, StrictArray))
        ASKED.add((name, method, of_inputs, str(out[0].dtype) if out else ""))
        if out:
            kwargs["out"] = _host(out[0])
        return _device(getattr(ufunc, method)(*map(_host, inputs), **kwargs))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # As CuPy looks a function up: in the module of its own that is named alike.
        name = f"{func.__module__}.{func.__name__}".removeprefix("numpy.")
        if name not in FUNCTIONS:
            raise TypeError(f"no implementation of {name} that the tests know")
        if not kwargs.keys() <= set(FUNCTIONS[name]):
            raise TypeError(f"{name}() got an unexpected keyword argument: {kwargs}")
        if name == "copyto":
            _refuse_overlap(*args[:2])
        if name == "concatenate" and {"out", "dtype"} <= kwargs.keys():
            raise TypeError("concatenate() only takes `out` or `dtype`")
        result = func(*map(_host, args), **{key: _host(each) for key, each in kwargs.items()})
        return _device(result)

    def __getitem__(self, index: Any) -> StrictArray:
        return self._view(self.host[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.host[_index(index)] = _host(value)

    def _method(self, name: str, allowed: tuple[str, ...], args: Any, kwargs: Any) -> Any:
        if not kwargs.keys() <= set(allowed):
            raise TypeError(f"{name}() got an unexpected keyword argument: {kwargs}")
        if "out" in kwargs:
            kwargs["out"] = _host(kwargs["out"])
        return self._view(getattr(self.host, name)(*map(_host, args), **kwargs))

    def set(self, host: np.ndarray) -> None:
        """Take a host array's elements."""
        if not isinstance(host, np.ndarray) or host.dtype != self.dtype:
            raise TypeError(f"{type(host).__name__} cannot be set to {self.dtype} array")
        if host.shape != self.shape:
            raise ValueError("Shape mismatch")
        if not (self.host.flags.c_contiguous or self.host.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        np.copyto(self.host, host)


def _add_methods() -> None:
    reducing = ("axis", "dtype", "out", "keepdims")
    allowed: dict[str, tuple[str, ...]] = {
        "all": ("axis", "out", "keepdims"),
        "any": ("axis", "out", "keepdims"),
        "argmax": reducing,
        "argmin": reducing,
        "argsort": ("axis",),
        "astype": ("copy",),
        "copy": (),
        "cumprod": reducing[:3],
        "cumsum": reducing[:3],
        "dot": ("out",),
        "fill": (),
        "max": ("axis", "out", "keepdims"),
        "mean": reducing,
        "min": ("axis", "out", "keepdims"),
        "prod": reducing,
        "ravel": (),
        "repeat": ("axis",),
        "reshape": (),
        "sort": ("axis",),
        "squeeze": ("axis",),
        "sum": reducing,
        "swapaxes": (),
        "take": ("axis", "out"),
        "transpose": (),
        "view": ("dtype",),
    }

    def method(name: str) -> Any:
        def call(self: StrictArray, *args: Any, **kwargs: Any) -> Any:
            return self._method(name, allowed[name], args, kwargs)

        return call

    for name in allowed:
        setattr(StrictArray, name, method(name))


_add_methods()


def _index(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    if isinstance(index, StrictArray):
        return index.host
    if index is None or index is Ellipsis or isinstance(index, (int, slice, np.integer)):
        return index
    raise TypeError(f"unsupported index of type {type(index).__name__}")


def _refuse_overlap(target: Any, source: Any) -> None:
    """CuPy's `copyto` of contiguous arrays of one dtype is a copy of memory, which has no order."""
    if not (isinstance(target, StrictArray) and isinstance(source, StrictArray)):
        return
    one, other = target.host, source.host
    moved = one.ctypes.data != other.ctypes.data or one.strides != other.strides
    if one.dtype == other.dtype and moved and np.may_share_memory(one, other):
        raise AssertionError("a copy within one memory")


def _host(value: Any) -> Any:
    """What a device's function reads; TypeError for arrays of the host."""
    if isinstance(value, StrictArray):
        return value.host
    if isinstance(value, np.ndarray):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (tuple, list)):
        return type(value)(map(_host, value))
    return value


def _device(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return StrictArray(np.asarray(value))
    if isinstance(value, tuple):  # also those with names
        return tuple(map(_device, value))
    if isinstance(value, list):
        return list(map(_device, value))
    return value


class StrictNamespace:
    """`context.arrays` of kernels on strict arrays."""

    ndarray = StrictArray

    def __init__(self, cuda: Any = None) -> None:
        self.cuda = cuda

    def asnumpy(self, array: StrictArray) -> np.ndarray:
        return array.host.copy()

    def asarray(self, value: Any) -> StrictArray:
        return StrictArray(value.host if isinstance(value, StrictArray) else np.array(value))

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name not in _CREATION and name not in FUNCTIONS and not isinstance(function, np.ufunc):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(function, np.ufunc) or name in FUNCTIONS:
                return function(*args, **kwargs)
            return _device(function(*map(_host, args), **kwargs))

        return function if isinstance(function, np.ufunc) else call
