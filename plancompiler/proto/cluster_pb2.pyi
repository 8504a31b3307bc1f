from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_NONE: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]
COMPRESSION_NONE: Compression
COMPRESSION_ZSTD: Compression

class ErrorReport(_message.Message):
    __slots__ = ("code", "what", "op", "source", "rank", "got", "expected", "hint")
    CODE_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    code: str
    what: str
    op: str
    source: str
    rank: int
    got: str
    expected: str
    hint: str
    def __init__(self, code: _Optional[str] = ..., what: _Optional[str] = ..., op: _Optional[str] = ..., source: _Optional[str] = ..., rank: _Optional[int] = ..., got: _Optional[str] = ..., expected: _Optional[str] = ..., hint: _Optional[str] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "compression", "raw_bytes", "wire_bytes", "digest", "checksum")
    DATA_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    compression: Compression
    raw_bytes: int
    wire_bytes: int
    digest: bytes
    checksum: int
    def __init__(self, data: _Optional[bytes] = ..., compression: _Optional[_Union[Compression, str]] = ..., raw_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class ChallengeRequest(_message.Message):
    __slots__ = ("nonce", "key")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    key: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., key: _Optional[bytes] = ...) -> None: ...

class ChallengeReply(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class ProveRequest(_message.Message):
    __slots__ = ("nonce", "key", "challenge", "proof", "is_worker")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    IS_WORKER_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    key: bytes
    challenge: bytes
    proof: bytes
    is_worker: bool
    def __init__(self, nonce: _Optional[bytes] = ..., key: _Optional[bytes] = ..., challenge: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., is_worker: _Optional[bool] = ...) -> None: ...

class ProveReply(_message.Message):
    __slots__ = ("session", "is_durable")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    is_durable: bool
    def __init__(self, session: _Optional[bytes] = ..., is_durable: _Optional[bool] = ...) -> None: ...

class JobRequest(_message.Message):
    __slots__ = ("job_id", "since", "beside", "key", "check")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    since: int
    beside: bool
    key: str
    check: int
    def __init__(self, job_id: _Optional[int] = ..., since: _Optional[int] = ..., beside: _Optional[bool] = ..., key: _Optional[str] = ..., check: _Optional[int] = ...) -> None: ...

class FilePart(_message.Message):
    __slots__ = ("name", "size", "data", "checksum", "check")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    data: bytes
    checksum: int
    check: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class LogsRequest(_message.Message):
    __slots__ = ("job_id", "rank", "follow", "check")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    rank: int
    follow: bool
    check: int
    def __init__(self, job_id: _Optional[int] = ..., rank: _Optional[int] = ..., follow: _Optional[bool] = ..., check: _Optional[int] = ...) -> None: ...

class LogsReply(_message.Message):
    __slots__ = ("lines", "check")
    LINES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    lines: _containers.RepeatedCompositeFieldContainer[RankLine]
    check: int
    def __init__(self, lines: _Optional[_Iterable[_Union[RankLine, _Mapping]]] = ..., check: _Optional[int] = ...) -> None: ...

class RankLine(_message.Message):
    __slots__ = ("rank", "time", "stream", "text", "dropped")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    rank: int
    time: float
    stream: str
    text: str
    dropped: int
    def __init__(self, rank: _Optional[int] = ..., time: _Optional[float] = ..., stream: _Optional[str] = ..., text: _Optional[str] = ..., dropped: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("header", "chunk", "check")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    header: SubmitHeader
    chunk: Chunk
    check: int
    def __init__(self, header: _Optional[_Union[SubmitHeader, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class SubmitHeader(_message.Message):
    __slots__ = ("version", "steps", "mode", "open", "restore", "save", "cache", "save_every", "deadline", "record", "anomaly", "restored", "ranks", "priority", "name", "compile_only", "key")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    SAVE_EVERY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ANOMALY_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    COMPILE_ONLY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    version: str
    steps: int
    mode: str
    open: bool
    restore: str
    save: str
    cache: bool
    save_every: int
    deadline: float
    record: bool
    anomaly: bool
    restored: _containers.RepeatedScalarFieldContainer[str]
    ranks: int
    priority: int
    name: str
    compile_only: bool
    key: str
    def __init__(self, version: _Optional[str] = ..., steps: _Optional[int] = ..., mode: _Optional[str] = ..., open: _Optional[bool] = ..., restore: _Optional[str] = ..., save: _Optional[str] = ..., cache: _Optional[bool] = ..., save_every: _Optional[int] = ..., deadline: _Optional[float] = ..., record: _Optional[bool] = ..., anomaly: _Optional[bool] = ..., restored: _Optional[_Iterable[str]] = ..., ranks: _Optional[int] = ..., priority: _Optional[int] = ..., name: _Optional[str] = ..., compile_only: _Optional[bool] = ..., key: _Optional[str] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("job_id", "world_size", "check")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    world_size: int
    check: int
    def __init__(self, job_id: _Optional[int] = ..., world_size: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("job_id", "steps", "chunk", "check")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    steps: int
    chunk: Chunk
    check: int
    def __init__(self, job_id: _Optional[int] = ..., steps: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class SaveRequest(_message.Message):
    __slots__ = ("job_id", "directory", "background", "check")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    directory: str
    background: bool
    check: int
    def __init__(self, job_id: _Optional[int] = ..., directory: _Optional[str] = ..., background: _Optional[bool] = ..., check: _Optional[int] = ...) -> None: ...

class OperationReply(_message.Message):
    __slots__ = ("ticket", "check")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    check: int
    def __init__(self, ticket: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ("cancelled", "check")
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    cancelled: bool
    check: int
    def __init__(self, cancelled: _Optional[bool] = ..., check: _Optional[int] = ...) -> None: ...

class JobEvents(_message.Message):
    __slots__ = ("events", "check")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[JobEvent]
    check: int
    def __init__(self, events: _Optional[_Iterable[_Union[JobEvent, _Mapping]]] = ..., check: _Optional[int] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("phase_changed", "compile_finished", "rank_outputs", "step_done", "ticket_done", "steps_dropped", "shipped", "rank_timeline", "waiting", "steps_failed", "steps_skipped")
    PHASE_CHANGED_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FINISHED_FIELD_NUMBER: _ClassVar[int]
    RANK_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STEP_DONE_FIELD_NUMBER: _ClassVar[int]
    TICKET_DONE_FIELD_NUMBER: _ClassVar[int]
    STEPS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_FIELD_NUMBER: _ClassVar[int]
    RANK_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STEPS_FAILED_FIELD_NUMBER: _ClassVar[int]
    STEPS_SKIPPED_FIELD_NUMBER: _ClassVar[int]
    phase_changed: PhaseChanged
    compile_finished: CompileFinished
    rank_outputs: RankOutputs
    step_done: int
    ticket_done: int
    steps_dropped: int
    shipped: Shipped
    rank_timeline: RankTimeline
    waiting: Waiting
    steps_failed: StepsFailed
    steps_skipped: int
    def __init__(self, phase_changed: _Optional[_Union[PhaseChanged, _Mapping]] = ..., compile_finished: _Optional[_Union[CompileFinished, _Mapping]] = ..., rank_outputs: _Optional[_Union[RankOutputs, _Mapping]] = ..., step_done: _Optional[int] = ..., ticket_done: _Optional[int] = ..., steps_dropped: _Optional[int] = ..., shipped: _Optional[_Union[Shipped, _Mapping]] = ..., rank_timeline: _Optional[_Union[RankTimeline, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., steps_failed: _Optional[_Union[StepsFailed, _Mapping]] = ..., steps_skipped: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("ranks", "count", "seconds", "stopped")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    count: int
    seconds: float
    stopped: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., count: _Optional[int] = ..., seconds: _Optional[float] = ..., stopped: _Optional[_Iterable[str]] = ...) -> None: ...

class StepsFailed(_message.Message):
    __slots__ = ("ticket", "error")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    error: ErrorReport
    def __init__(self, ticket: _Optional[int] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ...) -> None: ...

class PhaseChanged(_message.Message):
    __slots__ = ("phase", "seconds", "error")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    phase: str
    seconds: float
    error: ErrorReport
    def __init__(self, phase: _Optional[str] = ..., seconds: _Optional[float] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ...) -> None: ...

class CompileFinished(_message.Message):
    __slots__ = ("digest", "seconds", "cached")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    seconds: float
    cached: bool
    def __init__(self, digest: _Optional[str] = ..., seconds: _Optional[float] = ..., cached: _Optional[bool] = ...) -> None: ...

class Shipped(_message.Message):
    __slots__ = ("ranks", "world_size", "sent_bytes")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranks: int
    world_size: int
    sent_bytes: int
    def __init__(self, ranks: _Optional[int] = ..., world_size: _Optional[int] = ..., sent_bytes: _Optional[int] = ...) -> None: ...

class RankOutputs(_message.Message):
    __slots__ = ("step", "rank", "arrays")
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    step: int
    rank: int
    arrays: Chunk
    def __init__(self, step: _Optional[int] = ..., rank: _Optional[int] = ..., arrays: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class RankTimeline(_message.Message):
    __slots__ = ("rank", "timeline")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    timeline: Chunk
    def __init__(self, rank: _Optional[int] = ..., timeline: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class PlanPart(_message.Message):
    __slots__ = ("kind", "ranks", "digest", "world_size", "chunk", "check")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    kind: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    world_size: int
    chunk: Chunk
    check: int
    def __init__(self, kind: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., world_size: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: int
    def __init__(self, check: _Optional[int] = ...) -> None: ...

class ClusterStatus(_message.Message):
    __slots__ = ("version", "world_size", "workers", "jobs", "check")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    version: str
    world_size: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    check: int
    def __init__(self, version: _Optional[str] = ..., world_size: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ..., check: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("slot", "host", "device", "version", "job_id", "rank")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    slot: int
    host: str
    device: str
    version: str
    job_id: int
    rank: int
    def __init__(self, slot: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., job_id: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job_id", "name", "phase", "seconds", "error", "fetched_ranks", "sent_bytes", "queued_seconds", "ranks", "priority", "steps", "done_steps", "outputs", "owner", "open", "is_durable")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FETCHED_RANKS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DONE_STEPS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    name: str
    phase: str
    seconds: float
    error: ErrorReport
    fetched_ranks: int
    sent_bytes: int
    queued_seconds: float
    ranks: int
    priority: int
    steps: int
    done_steps: int
    outputs: _containers.RepeatedScalarFieldContainer[str]
    owner: str
    open: bool
    is_durable: bool
    def __init__(self, job_id: _Optional[int] = ..., name: _Optional[str] = ..., phase: _Optional[str] = ..., seconds: _Optional[float] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ..., fetched_ranks: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., queued_seconds: _Optional[float] = ..., ranks: _Optional[int] = ..., priority: _Optional[int] = ..., steps: _Optional[int] = ..., done_steps: _Optional[int] = ..., outputs: _Optional[_Iterable[str]] = ..., owner: _Optional[str] = ..., open: _Optional[bool] = ..., is_durable: _Optional[bool] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("job", "check")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    job: JobStatus
    check: int
    def __init__(self, job: _Optional[_Union[JobStatus, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class WorkerMessages(_message.Message):
    __slots__ = ("messages", "check")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[WorkerMessage]
    check: int
    def __init__(self, messages: _Optional[_Iterable[_Union[WorkerMessage, _Mapping]]] = ..., check: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("register", "heartbeat", "rank_compiled", "prepared", "outputs", "operation_done", "failed", "idle", "fetched", "written", "timeline_recorded", "run_failed", "log_lines", "number")
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RANK_COMPILED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    OPERATION_DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_RECORDED_FIELD_NUMBER: _ClassVar[int]
    RUN_FAILED_FIELD_NUMBER: _ClassVar[int]
    LOG_LINES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    register: Register
    heartbeat: Heartbeat
    rank_compiled: RankCompiled
    prepared: JobDone
    outputs: StepOutputs
    operation_done: OperationDone
    failed: JobFailed
    idle: JobDone
    fetched: Fetched
    written: OperationDone
    timeline_recorded: TimelineRecorded
    run_failed: RunFailed
    log_lines: LogLines
    number: int
    def __init__(self, register: _Optional[_Union[Register, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., rank_compiled: _Optional[_Union[RankCompiled, _Mapping]] = ..., prepared: _Optional[_Union[JobDone, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., operation_done: _Optional[_Union[OperationDone, _Mapping]] = ..., failed: _Optional[_Union[JobFailed, _Mapping]] = ..., idle: _Optional[_Union[JobDone, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., written: _Optional[_Union[OperationDone, _Mapping]] = ..., timeline_recorded: _Optional[_Union[TimelineRecorded, _Mapping]] = ..., run_failed: _Optional[_Union[RunFailed, _Mapping]] = ..., log_lines: _Optional[_Union[LogLines, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class Register(_message.Message):
    __slots__ = ("slot", "host", "device", "version", "host_id", "peer_address", "network", "is_loopback", "deadline", "token", "received")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PEER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    IS_LOOPBACK_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    host: str
    device: str
    version: str
    host_id: str
    peer_address: str
    network: str
    is_loopback: bool
    deadline: float
    token: bytes
    received: int
    def __init__(self, slot: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., host_id: _Optional[str] = ..., peer_address: _Optional[str] = ..., network: _Optional[str] = ..., is_loopback: _Optional[bool] = ..., deadline: _Optional[float] = ..., token: _Optional[bytes] = ..., received: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("stopped", "cpu_seconds", "gets_on", "received")
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    CPU_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GETS_ON_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    stopped: bool
    cpu_seconds: float
    gets_on: bool
    received: int
    def __init__(self, stopped: _Optional[bool] = ..., cpu_seconds: _Optional[float] = ..., gets_on: _Optional[bool] = ..., received: _Optional[int] = ...) -> None: ...

class BeatRequest(_message.Message):
    __slots__ = ("token", "heartbeat", "rank", "host", "check")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    heartbeat: Heartbeat
    rank: int
    host: str
    check: int
    def __init__(self, token: _Optional[bytes] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., check: _Optional[int] = ...) -> None: ...

class BeatReply(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: int
    def __init__(self, check: _Optional[int] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("job_id", "copy")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    copy: LocalCopy
    def __init__(self, job_id: _Optional[int] = ..., copy: _Optional[_Union[LocalCopy, _Mapping]] = ...) -> None: ...

class LocalCopy(_message.Message):
    __slots__ = ("process", "descriptor")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    process: int
    descriptor: int
    def __init__(self, process: _Optional[int] = ..., descriptor: _Optional[int] = ...) -> None: ...

class Facts(_message.Message):
    __slots__ = ("sync_id", "register", "name", "role", "ranks", "rank", "text")
    SYNC_ID_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    sync_id: _containers.RepeatedScalarFieldContainer[int]
    register: _containers.RepeatedScalarFieldContainer[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    role: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    rank: _containers.RepeatedScalarFieldContainer[int]
    text: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sync_id: _Optional[_Iterable[int]] = ..., register: _Optional[_Iterable[int]] = ..., name: _Optional[_Iterable[str]] = ..., role: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[int]] = ..., rank: _Optional[_Iterable[int]] = ..., text: _Optional[_Iterable[str]] = ...) -> None: ...

class RankCompiled(_message.Message):
    __slots__ = ("job_id", "digest", "reports", "cached", "kernels", "facts")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    digest: str
    reports: bool
    cached: bool
    kernels: str
    facts: Chunk
    def __init__(self, job_id: _Optional[int] = ..., digest: _Optional[str] = ..., reports: _Optional[bool] = ..., cached: _Optional[bool] = ..., kernels: _Optional[str] = ..., facts: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class JobDone(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("job_id", "step", "arrays")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    step: int
    arrays: Chunk
    def __init__(self, job_id: _Optional[int] = ..., step: _Optional[int] = ..., arrays: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class TimelineRecorded(_message.Message):
    __slots__ = ("job_id", "timeline")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    timeline: Chunk
    def __init__(self, job_id: _Optional[int] = ..., timeline: _Optional[_Union[Chunk, _Mapping]] = ...) -> None: ...

class OperationDone(_message.Message):
    __slots__ = ("job_id", "ticket")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    ticket: int
    def __init__(self, job_id: _Optional[int] = ..., ticket: _Optional[int] = ...) -> None: ...

class LogLines(_message.Message):
    __slots__ = ("job_id", "lines", "dropped")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    lines: _containers.RepeatedCompositeFieldContainer[LogLine]
    dropped: int
    def __init__(self, job_id: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[LogLine, _Mapping]]] = ..., dropped: _Optional[int] = ...) -> None: ...

class LogLine(_message.Message):
    __slots__ = ("time", "stream", "text")
    TIME_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    time: float
    stream: str
    text: str
    def __init__(self, time: _Optional[float] = ..., stream: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class RunFailed(_message.Message):
    __slots__ = ("job_id", "ticket", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    ticket: int
    error: ErrorReport
    def __init__(self, job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ...) -> None: ...

class JobFailed(_message.Message):
    __slots__ = ("job_id", "error")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    error: ErrorReport
    def __init__(self, job_id: _Optional[int] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ...) -> None: ...

class MasterMessage(_message.Message):
    __slots__ = ("registered", "refused", "heartbeat", "compile", "prepare", "run", "save", "write_index", "collect", "finish", "abort", "send_timeline", "send_plan", "send_files", "check")
    REGISTERED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    COMPILE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    WRITE_INDEX_FIELD_NUMBER: _ClassVar[int]
    COLLECT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SEND_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    SEND_PLAN_FIELD_NUMBER: _ClassVar[int]
    SEND_FILES_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    registered: Registered
    refused: ErrorReport
    heartbeat: Heartbeat
    compile: Compile
    prepare: Prepare
    run: Run
    save: Save
    write_index: Save
    collect: Collect
    finish: JobDone
    abort: JobFailed
    send_timeline: OperationDone
    send_plan: OperationDone
    send_files: SendFiles
    check: int
    def __init__(self, registered: _Optional[_Union[Registered, _Mapping]] = ..., refused: _Optional[_Union[ErrorReport, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., compile: _Optional[_Union[Compile, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., save: _Optional[_Union[Save, _Mapping]] = ..., write_index: _Optional[_Union[Save, _Mapping]] = ..., collect: _Optional[_Union[Collect, _Mapping]] = ..., finish: _Optional[_Union[JobDone, _Mapping]] = ..., abort: _Optional[_Union[JobFailed, _Mapping]] = ..., send_timeline: _Optional[_Union[OperationDone, _Mapping]] = ..., send_plan: _Optional[_Union[OperationDone, _Mapping]] = ..., send_files: _Optional[_Union[SendFiles, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class Registered(_message.Message):
    __slots__ = ("slot", "world_size", "silence_seconds", "token", "peer_key", "is_durable", "received")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SILENCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    PEER_KEY_FIELD_NUMBER: _ClassVar[int]
    IS_DURABLE_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    world_size: int
    silence_seconds: float
    token: bytes
    peer_key: bytes
    is_durable: bool
    received: int
    def __init__(self, slot: _Optional[int] = ..., world_size: _Optional[int] = ..., silence_seconds: _Optional[float] = ..., token: _Optional[bytes] = ..., peer_key: _Optional[bytes] = ..., is_durable: _Optional[bool] = ..., received: _Optional[int] = ...) -> None: ...

class Compile(_message.Message):
    __slots__ = ("job_id", "mode", "world_size", "cache", "digest", "share", "copy", "rank", "chunk")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    mode: str
    world_size: int
    cache: bool
    digest: bytes
    share: bool
    copy: LocalCopy
    rank: int
    chunk: bytes
    def __init__(self, job_id: _Optional[int] = ..., mode: _Optional[str] = ..., world_size: _Optional[int] = ..., cache: _Optional[bool] = ..., digest: _Optional[bytes] = ..., share: _Optional[bool] = ..., copy: _Optional[_Union[LocalCopy, _Mapping]] = ..., rank: _Optional[int] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("job_id", "transport_token", "restore", "far", "save", "deadline", "record", "open", "anomaly", "restored")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    FAR_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ANOMALY_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    transport_token: str
    restore: str
    far: _containers.RepeatedCompositeFieldContainer[PeerAddress]
    save: str
    deadline: float
    record: bool
    open: bool
    anomaly: bool
    restored: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, job_id: _Optional[int] = ..., transport_token: _Optional[str] = ..., restore: _Optional[str] = ..., far: _Optional[_Iterable[_Union[PeerAddress, _Mapping]]] = ..., save: _Optional[str] = ..., deadline: _Optional[float] = ..., record: _Optional[bool] = ..., open: _Optional[bool] = ..., anomaly: _Optional[bool] = ..., restored: _Optional[_Iterable[str]] = ...) -> None: ...

class SendFiles(_message.Message):
    __slots__ = ("ticket", "directory")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    directory: str
    def __init__(self, ticket: _Optional[int] = ..., directory: _Optional[str] = ...) -> None: ...

class PeerAddress(_message.Message):
    __slots__ = ("rank", "address")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("job_id", "ticket", "steps", "fed", "feeds")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    FED_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    ticket: int
    steps: int
    fed: bool
    feeds: bytes
    def __init__(self, job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., steps: _Optional[int] = ..., fed: _Optional[bool] = ..., feeds: _Optional[bytes] = ...) -> None: ...

class Save(_message.Message):
    __slots__ = ("job_id", "ticket", "directory", "background", "before")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    ticket: int
    directory: str
    background: bool
    before: bool
    def __init__(self, job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., directory: _Optional[str] = ..., background: _Optional[bool] = ..., before: _Optional[bool] = ...) -> None: ...

class Collect(_message.Message):
    __slots__ = ("job_id", "ticket", "before")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    ticket: int
    before: bool
    def __init__(self, job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., before: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("token", "job_id", "ticket", "digest", "offset", "check")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    job_id: int
    ticket: int
    digest: bytes
    offset: int
    check: int
    def __init__(self, token: _Optional[bytes] = ..., job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., digest: _Optional[bytes] = ..., offset: _Optional[int] = ..., check: _Optional[int] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("token", "job_id", "ticket", "chunk", "check")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    job_id: int
    ticket: int
    chunk: Chunk
    check: int
    def __init__(self, token: _Optional[bytes] = ..., job_id: _Optional[int] = ..., ticket: _Optional[int] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class FileUpload(_message.Message):
    __slots__ = ("token", "ticket", "part", "error", "check")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    ticket: int
    part: FilePart
    error: ErrorReport
    check: int
    def __init__(self, token: _Optional[bytes] = ..., ticket: _Optional[int] = ..., part: _Optional[_Union[FilePart, _Mapping]] = ..., error: _Optional[_Union[ErrorReport, _Mapping]] = ..., check: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("check",)
    CHECK_FIELD_NUMBER: _ClassVar[int]
    check: int
    def __init__(self, check: _Optional[int] = ...) -> None: ...
