"""Does the work of a worker's job in a thread of its own: compile, prepare, run, save, upload."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue

from plancompiler.blas.loaded_library import numeric_kernels
from plancompiler.cache.plan_cache import open_cache
from plancompiler.cluster.channel import TlsFiles, report_of
from plancompiler.cluster.checked import Sent
from plancompiler.cluster.chunks import (
    MAX_ARRAYS_BYTES,
    MAX_JOB_BYTES,
    Array,
    Assembler,
    arrays_from_bytes,
    arrays_to_bytes,
    to_chunks,
)
from plancompiler.cluster.messages import (
    Collect,
    Compile,
    Fetched,
    OperationDone,
    Outputs,
    Prepare,
    Prepared,
    RankCompiled,
    Run,
    RunFailed,
    Save,
    SendPlan,
    SendTimeline,
    TimelineRecorded,
    WorkerMessage,
    WriteIndex,
    Written,
)
from plancompiler.errors import (
    AbortedError,
    ClusterError,
    LimitError,
    NonFiniteError,
    PlanCompilerError,
)
from plancompiler.executor.checkpoint import (
    KeepGoing,
    check_no_others,
    load_shards,
    make_folder,
    save_shards,
    saved_names,
    shards_to_bytes,
    write_index,
)
from plancompiler.executor.checkpoint_writer import CheckpointWriter
from plancompiler.executor.fed_rates import FEED, rates_from_feeds
from plancompiler.executor.runtime import Runtime
from plancompiler.executor.temporary_folder import TemporaryFolder
from plancompiler.executor.trace import recorded_bytes
from plancompiler.ir.whole_file import naming_output
from plancompiler.limits.time_limits import DEADLINE
from plancompiler.lower.rank import plan_of_slice
from plancompiler.plan.digest import cross_rank_facts, plan_digest
from plancompiler.plan.plan import Plan
from plancompiler.plan.serde import plan_from_bytes, plan_to_bytes
from plancompiler.plan.verify import verify_plan
from plancompiler.proto import cluster_pb2 as pb
from plancompiler.proto.cluster_pb2 import Chunk
from plancompiler.proto.cluster_pb2_grpc import WorkerStub
from plancompiler.worker.allowed_paths import AllowedPaths
from plancompiler.worker.events import (
    Closed,
    SaveFailed,
    SaveWritten,
    Work,
    WorkDone,
    WorkerEvent,
    WorkFailed,
)
from plancompiler.worker.job_log import JobLog
from plancompiler.worker.local_copy import OfferedCopy, read_copy
from plancompiler.worker.outbox import Outbox
from plancompiler.worker.peers import Peers
from plancompiler.worker.transfer import Interruption, Transfers

_log = logging.getLogger(__name__)


class JobRunner:
    """One rank's hands. Orders return at once; `report` hears what came of them."""

    def __init__(
        self,
        stub: WorkerStub,
        address: str,
        tls: TlsFiles | None,
        session: bytes,
        peers: Peers,
        report: Callable[[WorkerEvent], None],
        outbox: Outbox,
        before_running: Callable[[], None],
        record: Path | None = None,
        device: str | None = None,
        deadline: float = DEADLINE,
        allowed: AllowedPaths | None = None,
        log: JobLog | None = None,
        max_memory: int | None = None,
    ) -> None:
        self.token = b""
        """As the master gave it."""
        self.rank = 0
        """Of the job at hand."""
        self._stub = stub
        self._peers = peers
        self._report = report
        self._outbox = outbox
        self._record = record
        self._recorded: TemporaryFolder | None = None
        """Where the job at hand is recorded, if the client wants that and `record` is None."""
        self._device = device
        self._deadline = deadline
        self._before_running = before_running
        self._allowed = allowed
        """Where paths of jobs may lead; None for anywhere."""
        self._log = log or JobLog()
        self._max_memory = max_memory
        """Bytes that a plan's blocks may take together; None for any number."""
        self._cache = open_cache()
        self._orders: SimpleQueue[Work | int | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._interruption = Interruption()
        self._transfers = Transfers(address, tls, self._interruption, session)
        self._copy: OfferedCopy | None = None
        """Of the slice or plan, until all ranks have theirs."""
        self._runtime: Runtime | None = None
        self._plan: Plan | None = None
        self._outputs: dict[int, dict[str, Array]] = {}
        self._run_until = 0
        """The step after those of the run at hand."""
        self._writer = CheckpointWriter("plancompiler-checkpoint")
        self._saved_step = 0
        """The step of the checkpoint whose shards were written last."""
        self._thread = threading.Thread(target=self._work, name="plancompiler-job", daemon=True)
        self._thread.start()

    # --- called by the agent's thread -----------------------------------------------------------

    @property
    def transferred(self) -> int:
        """Grows with every piece of a transfer."""
        return self._transfers.pieces

    def reconnected(self, stub: WorkerStub, session: bytes) -> None:
        """The master was started again, and is reached over another connection."""
        self._stub = stub
        self._transfers.reconnected(session)

    def start(self, work: Work) -> None:
        """Queue work."""
        self._orders.put(work)

    def interrupt(self, error: PlanCompilerError) -> None:
        """Make the work at hand fail soon."""
        self._interruption.interrupt(error)
        with self._lock:
            runtime = self._runtime
        if runtime is not None:
            runtime.abort(AbortedError("the job was stopped", rank=self.rank, got=str(error)))

    def write_index_beside(self, order: WriteIndex) -> None:
        """Write the index of the checkpoint that is under way, beside other work."""
        self._write_beside(order, lambda _: self._write_index(order))

    def close_job(self, job_id: int) -> None:
        """Let go of the job once the work before is done."""
        self._orders.put(job_id)

    def stop(self, seconds: float) -> None:
        """End the thread."""
        self._orders.put(None)
        self._thread.join(seconds)

    # --- the job's thread -----------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            order = self._orders.get()
            if order is None:
                self._let_go()
                self._transfers.close()
                return
            if isinstance(order, int):
                self._let_go()
                self._send_log()
                self._log.begin(0)
                self._report(Closed(order))
                continue
            doing = f"job {order.job_id}, {type(order).__name__.lower()}"
            try:
                reply = self._do(order)
            except BaseException as error:  # whatever it was, the master must hear of it
                self._log.add_error(error)
                self._send_log()
                self._report(WorkFailed(order.job_id, report_of(error, doing)))
            else:
                self._send_log()
                self._report(WorkDone(order.job_id, reply))

    def _send_log(self) -> None:
        """What was printed so far, before the master hears what came of it."""
        for lines in self._log.take(work_has_ended=True):
            self._outbox.put(lines)

    def _do(self, work: Work) -> WorkerMessage:
        self._interruption.rank = self.rank
        self._interruption.check()
        match work:
            case Compile():
                return self._compile(work)
            case Prepare():
                self._prepare(work)
                return Prepared(work.job_id)
            case Run():
                try:
                    self._run(work)
                except (NonFiniteError, AbortedError) as error:
                    if not self._prepared().can_be_saved:
                        raise
                    self._outputs.clear()
                    return RunFailed(work.job_id, work.ticket, error.report)
            case Save():
                self._save(work)
            case WriteIndex():
                self._write_index(work)
            case Collect():
                self._collect(work)
            case SendTimeline():
                self._send_timeline(work)
            case SendPlan():
                self._upload(work, to_chunks(plan_to_bytes(self._compiled()), compress=True))
        return OperationDone(work.job_id, work.ticket)

    def _compile(self, work: Compile) -> RankCompiled:
        self.rank = self._interruption.rank = work.rank
        self._log.begin(work.job_id, work.rank, work.world_size)
        data = self._slice_or_plan(work)
        cached = True  # a plan that the master sent costs nothing here
        if work.mode == "rank_per_process":
            plan, cached = plan_of_slice(data, self.rank, self._cache if work.cache else None)
        else:
            plan = plan_from_bytes(data)
            verify_plan(plan)
        if (plan.rank, plan.world_size) != (self.rank, work.world_size):
            raise ClusterError(
                "the master sent the plan of another rank or world",
                got=f"rank {plan.rank} of {plan.world_size}",
                expected=f"rank {self.rank} of {work.world_size}",
            )
        if self._allowed is not None:
            self._allowed.check_plan(plan)
        self._check_memory(plan)
        self._plan = plan
        facts = tuple(cross_rank_facts(plan))
        kernels = "" if plan.is_idle else numeric_kernels()
        return RankCompiled(
            work.job_id, plan_digest(plan), bool(plan.outputs), facts, cached, kernels
        )

    def _check_memory(self, plan: Plan) -> None:
        nbytes = sum(block.nbytes for block in plan.blocks)
        if self._max_memory is not None and nbytes > self._max_memory:
            raise LimitError(
                "the job takes more memory than this worker gives to one",
                rank=self.rank,
                got=f"{nbytes} bytes of variables and buffers",
                expected=f"at most {self._max_memory} bytes",
                hint="use more ranks or smaller batches, or start the worker with a larger "
                "--max-memory",
            )

    def _slice_or_plan(self, work: Compile) -> bytes:
        """From a worker of this host that has it, where there is one; else from the master."""
        data = None
        if work.chunk:
            data = Assembler("the rank's slice or plan", MAX_JOB_BYTES).add_message(work.chunk)
        elif work.copy is not None:
            data = read_copy(work.copy, work.digest, MAX_JOB_BYTES)
            if data is None:
                _log.warning("rank %d: no copy on this host, so the master is asked", self.rank)
        if data is None:
            request = pb.FetchRequest(token=self.token, job_id=work.job_id, digest=work.digest)
            data = self._transfers.fetch(request, "the rank's slice or plan", MAX_JOB_BYTES)
        if work.share:
            try:
                self._copy = OfferedCopy(data)
            except OSError as error:
                _log.warning("rank %d can share nothing on this host: %s", self.rank, error)
        self._outbox.put(Fetched(work.job_id, None if self._copy is None else self._copy.place))
        return data

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _prepare(self, work: Prepare) -> None:
        self._drop_copy()
        plan = self._compiled()
        if work.restore and self._allowed is not None:
            self._allowed.check_folder(work.restore, "the checkpoint to restore")
        if work.save:
            self._check_save(work.save)
            make_folder(work.save)
        if work.restore and work.restored:
            check_no_others(work.restore, frozenset(work.restored))
        variables, step = load_shards(work.restore, plan) if work.restore else (None, 0)
        self._outputs.clear()
        count = len(plan.outputs)

        def on_output(step: int, name: str, value: Array) -> None:
            with self._lock:
                if self._runtime is not None and step >= self._runtime.finite_until:
                    return
                outputs = self._outputs.setdefault(step, {})
                outputs[name] = value
                if len(outputs) < count:
                    return
                del self._outputs[step]
            # Those of the last step are followed by the end of the run. To send them before would
            # take the interpreter from its streams.
            self._outbox.put(
                Outputs(work.job_id, step, arrays_to_bytes(outputs)),
                hurry=step + 1 != self._run_until,
            )

        record = self._record
        if work.record and record is None:
            with naming_output("a recording", "the temporary folder"):
                self._recorded = TemporaryFolder("plancompiler-trace-")
            record = self._recorded.path
        runtime = Runtime(
            plan,
            self._peers.link(
                work.transport_token,
                self.rank,
                plan.world_size,
                {peer.rank: peer.address for peer in work.far},
            ),
            variables=variables,
            first_step=step,
            on_outputs=on_output,
            deadline=work.deadline or self._deadline,
            record=record,
            device=self._device,
            anomaly=work.anomaly or None,  # None leaves it to the environment
            keep=work.open,
        )
        with self._lock:
            self._runtime = runtime
        self._before_running()  # ops may hold the interpreter
        self._interruption.check()
        runtime.prepare()

    def _run(self, work: Run) -> None:
        runtime = self._prepared()
        rates = None
        if work.fed:
            request = pb.FetchRequest(token=self.token, job_id=work.job_id, ticket=work.ticket)
            feeds = arrays_from_bytes(
                work.feeds or self._transfers.fetch(request, "the feeds", MAX_ARRAYS_BYTES)
            )
            rates = rates_from_feeds(feeds)
            if feeds.keys() - {FEED}:
                runtime.feed({name: feeds[name] for name in runtime.input_names if name in feeds})
        self._run_until = runtime.steps_done + work.steps
        runtime.run(work.steps, rates)

    def _save(self, order: Save) -> None:
        self._check_save(order.directory)
        runtime = self._prepared()
        plan = runtime.plan
        kept, step = runtime.state(saved_names(plan), order.before)
        self._saved_step = step
        if not order.background:
            save_shards(order.directory, plan, kept, step, f"{order.ticket}")
            return

        def write(keep_going: KeepGoing) -> None:
            save_shards(order.directory, plan, kept, step, f"{order.ticket}", keep_going)

        self._write_beside(order, write)

    def _check_save(self, folder: str) -> None:
        if self._allowed is not None:
            self._allowed.check(folder, "the folder of a checkpoint")

    def _write_index(self, order: WriteIndex) -> None:
        self._check_save(order.directory)
        world_size = self._prepared().plan.world_size
        write_index(order.directory, world_size, self._saved_step, tag=f"{order.ticket}")

    def _write_beside(self, order: Save | WriteIndex, write: Callable[[KeepGoing], None]) -> None:
        """Write in a thread of its own, and report what came of it unless it was given up."""

        def work(keep_going: KeepGoing) -> None:
            try:
                write(keep_going)
            except AbortedError:
                return
            except BaseException as error:
                doing = f"job {order.job_id}, a checkpoint in {order.directory}"
                self._report(SaveFailed(order.job_id, report_of(error, doing)))
            else:
                written = Written(order.job_id, order.ticket)
                self._report(SaveWritten(order.job_id, written))

        self._writer.start(work)

    def _compiled(self) -> Plan:
        if self._plan is None:
            raise ClusterError("the master asked for something of a job that was not compiled")
        return self._plan

    def _prepared(self) -> Runtime:
        if self._runtime is None:
            raise ClusterError("the master asked to run a job that was not prepared")
        return self._runtime

    def _let_go(self) -> None:
        with self._lock:
            runtime, self._runtime = self._runtime, None
        self._interruption.clear()
        self._drop_copy()
        self._writer.stop()
        if runtime is not None:
            try:
                runtime.close()
            except Exception:
                _log.exception("rank %d could not close its runtime", self.rank)
        recorded, self._recorded = self._recorded, None
        if recorded is not None:
            recorded.close()
        self._plan = None
        self._outputs.clear()

    def _send_timeline(self, work: SendTimeline) -> None:
        self._prepared()
        folder = self._record if self._recorded is None else self._recorded.path
        if folder is None:
            raise ClusterError("the master asked for a timeline that was not recorded")
        self._outbox.put(TimelineRecorded(work.job_id, recorded_bytes(folder, self.rank)))

    def _collect(self, work: Collect) -> None:
        runtime = self._prepared()
        plan = runtime.plan
        kept, step = runtime.state(saved_names(plan), work.before)
        self._upload(work, to_chunks(shards_to_bytes(plan, kept, step)))

    def _upload(self, work: Collect | SendPlan, chunks: Iterable[Chunk]) -> None:
        def requests() -> Iterator[pb.UploadRequest]:
            sent = Sent()
            yield sent(pb.UploadRequest(token=self.token, job_id=work.job_id, ticket=work.ticket))
            for chunk in chunks:
                self._transfers.pieces += 1
                yield sent(pb.UploadRequest(chunk=chunk))

        self._transfers.upload(self._stub.Upload, requests())
