"""`dir()` of the package and of tensors shows what users may use, and nothing internal."""

from __future__ import annotations

import numpy as np

import plancompiler as pc
from plancompiler import public
from plancompiler.eager.inplace_methods import InPlaceMethods
from plancompiler.eager.materialized_view import MaterializedView
from plancompiler.frontend.methods import METHODS

SPECIAL = {name for name in vars(InPlaceMethods) if name.startswith("__")}

SHARED = """T cast detach dtype equal exp gelu item log mT max mean min ndim not_equal numpy
placement redistribute relu reshape shape sigmoid size sqrt sum tanh tolist transpose"""
EAGER = """backward base copy_ device fill_ from_local grad is_leaf is_view local_shape
register_hook requires_grad requires_grad_ sbp to_device to_local zero_"""


def names(*lists: str) -> set[str]:
    return {*METHODS, *(name for each in lists for name in each.split())}


def public_names(thing: object) -> set[str]:
    return {name for name in dir(thing) if not (name.startswith("__") and name.endswith("__"))}


def test_the_package_shows_its_public_names() -> None:
    assert dir(pc) == sorted(public.__all__)


def test_eager_tensors_and_their_views_show_what_users_may_use() -> None:
    def program() -> list[set[str]]:
        x = pc.tensor(np.ones((4, 3)), pc.Placement("cpu", [0, 1]), "S(0)")
        view = x[1:3]
        assert isinstance(view, MaterializedView)
        return [public_names(each) for each in (x, view)]

    wanted = names(SHARED, EAGER) | vars(InPlaceMethods).keys() - SPECIAL
    assert pc.eager.spawn(program, ranks=2) == [[wanted] * 2] * 2


def test_values_of_a_job_and_traced_tensors_show_what_users_may_use() -> None:
    with pc.job("names"):
        x = pc.input("x", (3,), "float32", pc.Placement("cpu", [0]))
        assert public_names(x) == names(SHARED, "name source type")
        pc.output("x", x)
    shown = []

    @pc.compile
    def function(x: pc.DistTensor) -> pc.DistTensor:
        shown.append(public_names(x))
        return x * 2

    def program() -> None:
        function(pc.tensor(np.ones(3), pc.Placement("cpu", [0])))

    pc.eager.spawn(program, ranks=1)
    assert shown == [names(SHARED, EAGER) | vars(InPlaceMethods).keys() - SPECIAL]
