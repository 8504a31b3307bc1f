"""`pc.data.DataLoader`: which batches it gives, to whom, and from where it continues."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plancompiler as pc
from plancompiler import eager
from plancompiler.errors import DataError, UsageError
from plancompiler.frontend.data import DataLoader

X = np.arange(22.0).reshape(11, 2)
Y = np.arange(11)


class Squares:
    """A sequence that is not an array."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> dict[str, Any]:
        if not 0 <= row < 7:
            raise IndexError(row)
        return {"number": row, "square": np.array([row * row, os.getpid()])}


def lists(loader: DataLoader) -> list[list[int]]:
    return [batch[1].tolist() for batch in loader]


def test_batches_of_arrays_are_their_rows_in_order() -> None:
    loader = DataLoader((X, Y), batch_size=4)
    assert len(loader) == 3
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    for x, y in loader:
        np.testing.assert_array_equal(x[:, 0], 2 * y)
    assert len(DataLoader((X, Y), 4, drop_last=True)) == 2
    assert lists(DataLoader((X, Y), 4, drop_last=True)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (batch,) = DataLoader({"x": X, "y": Y}, 11)
    assert set(batch) == {"x", "y"}


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    loader, again = (DataLoader((X, Y), 4, shuffle=True, seed=3) for _ in range(2))
    epochs = [[row for batch in lists(loader) for row in batch] for _ in range(3)]
    assert [[row for batch in lists(again) for row in batch] for _ in range(3)] == epochs
    assert all(sorted(each) == Y.tolist() for each in epochs)
    assert len({tuple(each) for each in epochs}) == 3
    sampled = DataLoader((X, Y), 2, sampler=lambda epoch: [epoch, 5, 5])
    assert [lists(sampled), lists(sampled)] == [[[0, 5], [5]], [[1, 5], [5]]]


@pytest.mark.parametrize("left", [0, 1, 2, 3, 4])
def test_a_loader_continues_at_its_place(left: int) -> None:
    """After any number of batches, whether the epoch is over or not, also by the number alone."""

    def batches(loader: DataLoader) -> Iterator[list[int]]:
        while True:
            yield from lists_of(loader)

    def lists_of(loader: DataLoader) -> Iterator[list[int]]:
        for _, y in loader:
            yield y.tolist()

    straight = batches(DataLoader((X, Y), 4, shuffle=True))
    wanted = [next(straight) for _ in range(9)]
    loader = DataLoader((X, Y), 4, shuffle=True)
    begun = batches(loader)
    for _ in range(left):
        next(begun)
    state = loader.state_dict()
    for restore in (lambda it: it.load_state_dict(state), lambda it: it.seek(left)):
        resumed = DataLoader((X, Y), 4, shuffle=True)
        restore(resumed)
        rest = batches(resumed)
        assert [next(rest) for _ in range(9 - left)] == wanted[left:]


def test_a_loop_that_is_left_early_ends_its_epoch() -> None:
    loader = DataLoader((X, Y), 4, sampler=lambda epoch: [epoch] * 5)
    for _, y in loader:
        assert y[0] == 0
        break
    assert lists(loader) == [[1, 1, 1, 1], [1]]


def test_items_are_changed_and_stacked() -> None:
    def change(item: dict[str, Any]) -> tuple[float, Any]:
        return item["number"] / 2, item["square"][:1]

    (batch,) = DataLoader(Squares(), 7, map=change)
    assert batch[0].dtype == np.float32
    assert batch[0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert batch[1].shape == (7, 1)
    uneven = [np.arange(count) for count in (2, 1)]
    with pytest.raises(DataError, match="different shapes") as caught:
        next(iter(DataLoader(uneven, 2)))
    assert "collate_fn" in str(caught.value)
    (padded,) = DataLoader(uneven, 2, collate_fn=lambda items: [len(each) for each in items])
    assert padded == [2, 1]


def test_an_iterable_is_read_in_its_order_and_skipped_to_its_place() -> None:
    class Stream:
        def __iter__(self) -> Iterator[tuple[Any, int]]:
            return iter([(X[row], row) for row in range(11)])

    loader = DataLoader(Stream(), 4)
    assert lists(loader) == lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    loader.load_state_dict({"epoch": 5, "batch": 2})
    assert lists(loader) == [[8, 9, 10]]
    with pytest.raises(UsageError, match="has no length"):
        loader.seek(3)
    with pytest.raises(UsageError, match="in its own order"):
        DataLoader(Stream(), shuffle=True)


def test_ranks_read_their_own_rows() -> None:
    read: list[list[int]] = [[], [], []]

    class Counted:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, row: int) -> tuple[Any, int]:
            read[eager.current_world().rank].append(row)
            return X[row], row

    def program() -> bool:
        mesh = pc.Placement("cpu", [0, 1])
        same = True
        loader = DataLoader(Counted(), 5, placement=mesh, sbp="S(0)")
        for (x, y), start in zip(loader, (0, 5, 10), strict=True):
            rows = slice(start, start + 5)
            same &= pc.array_equal(x, pc.tensor(X[rows], mesh))
            same &= pc.array_equal(y, pc.tensor(Y[rows], mesh))
            same &= str(x.sbp[0]) == "S(0)"
        columns = DataLoader({"x": X}, 4, placement=mesh, sbp="S(1)")
        return same and all(
            pc.array_equal(batch["x"], pc.tensor(X[at : at + 4], mesh))
            for at, batch in zip((0, 4, 8), columns, strict=True)
        )

    assert eager.spawn(program, ranks=3) == [True] * 3
    # A rank without rows of a batch reads one, to know their shape.
    assert read == [[0, 1, 2, 5, 6, 7, 10], [3, 4, 8, 9, 10], [0, 5, 10]]


@pytest.mark.processes
def test_processes_read_ahead_and_end() -> None:
    with DataLoader(Squares(), 2, num_workers=2) as loader:
        batches = list(loader)
        processes = {int(each) for batch in batches for each in batch["square"][:, 1]}
        assert os.getpid() not in processes
        numbers = [batch["number"].tolist() for batch in batches]
        assert numbers == [[0, 1], [2, 3], [4, 5], [6]]
        for batch in loader:
            assert batch["number"].tolist() == [0, 1]
            break
        assert [batch["number"].tolist() for batch in loader] == numbers
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{each}").exists() for each in processes):
        assert time.monotonic() < deadline
    with pytest.raises(DataError, match="importable"):
        list(DataLoader(Squares(), 2, num_workers=1, map=lambda item: item))


def test_a_restored_session_continues_with_the_next_batch(tmp_path: Path) -> None:
    def build() -> pc.Job:
        with pc.job("means") as job:
            x = pc.input("x", (2, 2), "float32", pc.Placement("cpu", [0]))
            w = pc.nn.Parameter((2, 2), "float32", "zeros").place(x.placement)
            loss = (w.value * x).sum()
            pc.optim.SGD(0.1).minimize(loss)
            pc.output("loss", loss)
        return job

    def losses(loader: DataLoader, session: pc.Session, steps: int) -> list[Any]:
        made: list[Any] = []
        while True:
            for batch in loader:
                if len(made) == steps:
                    return made
                made.append(session.step(**batch)["loss"])

    def loader() -> DataLoader:
        return DataLoader({"x": X}, 2, shuffle=True, drop_last=True)

    with pc.run(build()) as session:
        wanted = losses(loader(), session, 12)
    with pc.run(build()) as session:
        assert losses(loader(), session, 7) == wanted[:7]
        session.save(tmp_path)
    with pc.run(build(), restore=tmp_path) as session:
        assert session.next_step == 7
        rest = loader()
        rest.seek(session.next_step)
        assert losses(rest, session, 5) == wanted[7:]


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(UsageError, match="a sequence or an iterable"):
        DataLoader(3)
    with pytest.raises(DataError, match="different numbers of rows"):
        DataLoader((X, Y[:3]))
    with pytest.raises(UsageError, match="batch_size must be positive"):
        DataLoader((X, Y), 0)
    with pytest.raises(UsageError, match="not the place"):
        DataLoader((X, Y)).load_state_dict({"epoch": 1})
    with pytest.raises(UsageError, match="split or broadcast"):
        DataLoader((X, Y), placement=pc.Placement("cpu", [0]), sbp="P")
    with pc.job("traced"):
        pc.output("x", pc.zeros((2,), "float32", pc.Placement("cpu", [0])))
        with pytest.raises(UsageError, match="while it is traced"):
            next(iter(DataLoader((X, Y))))
