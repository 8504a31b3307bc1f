"""What is handed to NCCL, by the parameters of CuPy's communicator, and how calls meet an abort."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from plancompiler.errors import TransportError
from plancompiler.executor.cuda import device, interface
from plancompiler.executor.cuda.device import NcclCommunicator
from plancompiler.executor.cuda.interface import CallKind, abort_all, close_all, grouped
from plancompiler.ir import Reduction
from tests.executor.cuda.strict import StrictArray

STREAM = SimpleNamespace(ptr=99)


class NcclError(RuntimeError):
    pass


class Communicator:
    """CuPy's `NcclCommunicator`: its methods' parameters, in its order."""

    def __init__(self):
        self.calls = []
        self.fails = False
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()

    def _note(self, **call):
        self.calls.append(call)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        call = {"send": sendbuf, "receive": recvbuf, "count": count, "type": datatype}
        self._note(**call, op=op, stream=stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        call = {"send": sendbuf, "receive": recvbuf, "count": count, "type": datatype}
        self._note(**call, op=op, root=root, stream=stream)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        call = {"send": sendbuff, "receive": recvbuff, "count": count, "type": datatype}
        self._note(**call, root=root, stream=stream)

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):  # noqa: N802
        call = {"send": sendbuf, "receive": recvbuf, "count": recvcount, "type": datatype}
        self._note(**call, op=op, stream=stream)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # noqa: N802
        call = {"send": sendbuf, "receive": recvbuf, "count": count, "type": datatype}
        self._note(**call, stream=stream)

    def send(self, sendbuf, count, datatype, peer, stream):
        self._note(send=sendbuf, count=count, type=datatype, peer=peer, stream=stream)

    def recv(self, recvbuf, count, datatype, peer, stream):
        self._note(receive=recvbuf, count=count, type=datatype, peer=peer, stream=stream)

    def check_async_error(self):
        self.entered.set()
        self.goes_on.wait(30)
        if self.fails:
            raise NcclError("NCCL_ERROR_REMOTE_ERROR: a rank is gone")

    def abort(self):
        self._note(abort=True)

    def destroy(self):
        self._note(destroy=True)


def opened():
    nccl = SimpleNamespace(
        NcclError=NcclError,
        NCCL_SUM=0,
        NCCL_MAX=2,
        NCCL_UINT8=1,
        NCCL_FLOAT16=6,
        NCCL_FLOAT32=7,
    )
    inner = Communicator()
    nccl.groupStart = lambda: inner._note(group="start")
    nccl.groupEnd = lambda: inner._note(group="end")
    return NcclCommunicator(nccl, inner), inner


def array(size, dtype=np.float32):
    array = StrictArray(np.zeros(size, dtype))
    return array, array.data.ptr


def test_each_call_says_what_it_should():
    communicator, inner = opened()
    (six, a), (two, b), (half, c) = array(6), array(2), array(6, np.float16)
    communicator.call(CallKind.ALL_REDUCE, STREAM, six, six, Reduction.SUM)
    communicator.call(CallKind.REDUCE_SCATTER, STREAM, six, two, Reduction.MAX)
    communicator.call(CallKind.REDUCE, STREAM, half, half, Reduction.SUM, 3)
    communicator.call(CallKind.ALL_GATHER, STREAM, two, six)
    communicator.call(CallKind.BROADCAST, STREAM, six, six, peer=2)
    communicator.call(CallKind.SEND, STREAM, half, None, peer=1)
    communicator.call(CallKind.RECEIVE, STREAM, None, two, peer=4)
    assert inner.calls == [
        {"send": a, "receive": a, "count": 6, "type": 7, "op": 0, "stream": 99},
        {"send": a, "receive": b, "count": 2, "type": 7, "op": 2, "stream": 99},
        {"send": c, "receive": c, "count": 6, "type": 6, "op": 0, "root": 3, "stream": 99},
        # What is only moved are bytes.
        {"send": b, "receive": a, "count": 8, "type": 1, "stream": 99},
        {"send": a, "receive": a, "count": 24, "type": 1, "root": 2, "stream": 99},
        {"send": c, "count": 12, "type": 1, "peer": 1, "stream": 99},
        {"receive": b, "count": 8, "type": 1, "peer": 4, "stream": 99},
    ]


def test_an_error_of_nccls_is_a_transport_error():
    communicator, inner = opened()
    communicator.check()
    inner.fails = True
    with pytest.raises(TransportError, match="a rank is gone"):
        communicator.check()


def test_nothing_is_called_after_an_abort():
    communicator, inner = opened()
    six, _ = array(6)
    communicator.abort()
    communicator.abort()
    communicator.close()
    communicator.check()
    with pytest.raises(TransportError, match="aborted"):
        communicator.call(CallKind.ALL_REDUCE, STREAM, six, six, Reduction.SUM)
    assert inner.calls == [{"abort": True}]


@pytest.mark.parametrize("patience", [0.0, 30.0])
def test_an_abort_waits_for_a_call_to_leave_but_not_for_long(patience, monkeypatch):
    monkeypatch.setattr(device, "ABORT_SECONDS", patience)
    communicator, inner = opened()
    inner.goes_on.clear()
    caller = threading.Thread(target=communicator.check)
    caller.start()
    assert inner.entered.wait(30)
    if patience:
        aborter = threading.Thread(target=communicator.abort)
        aborter.start()
        assert inner.calls == []
        inner.goes_on.set()
        aborter.join()
    else:
        # A call that only the abort can end.
        communicator.abort()
        assert inner.calls == [{"abort": True}]
        inner.goes_on.set()
    caller.join()
    assert inner.calls == [{"abort": True}]


def test_a_group_ends_whatever_happens_in_it():
    """Else NCCL would keep what the thread calls later, and launch nothing of it."""
    communicator, inner = opened()
    with pytest.raises(ValueError, match="no memory"), grouped(communicator):
        raise ValueError("no memory")
    assert inner.calls == [{"group": "start"}, {"group": "end"}]
    communicator.abort()
    with pytest.raises(TransportError, match="aborted"), grouped(communicator):
        pytest.fail("begun after an abort")
    assert inner.calls[2:] == [{"abort": True}]


def test_an_abort_comes_before_or_after_a_group():
    communicator, inner = opened()
    aborter = threading.Thread(target=communicator.abort)
    with grouped(communicator):
        aborter.start()
        communicator.call(CallKind.SEND, STREAM, array(2)[0], None, peer=1)
    aborter.join()
    assert [next(iter(call)) for call in inner.calls] == ["group", "send", "group", "abort"]


def test_a_look_does_not_wait_for_a_thread_that_is_in_nccl():
    communicator, inner = opened()
    inner.goes_on.clear()
    caller = threading.Thread(target=communicator.check)
    caller.start()
    assert inner.entered.wait(30)
    inner.fails = True
    communicator.check()
    inner.fails = False
    inner.goes_on.set()
    caller.join()


@pytest.mark.parametrize("end", [abort_all, close_all])
def test_ends_do_not_wait_for_each_other(end, monkeypatch):
    """NCCL's may return only when all members have ended, here one after the other."""
    monkeypatch.setattr(interface, "ABORT_PATIENCE", 0.01)
    monkeypatch.setattr(interface, "CLOSE_PATIENCE", 0.01)
    members = threading.Barrier(2)
    ended = [threading.Event(), threading.Event()]

    class Waiting:
        def __init__(self, member):
            self.member = member

        def abort(self):
            members.wait(30)
            ended[self.member].set()

        close = abort

    for member in range(2):
        end([Waiting(member)])
    assert all(each.wait(30) for each in ended)
