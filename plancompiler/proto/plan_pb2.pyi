from plancompiler.proto import job_pb2 as _job_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Stream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_UNSPECIFIED: _ClassVar[Stream]
    STREAM_COMPUTE: _ClassVar[Stream]
    STREAM_COLLECTIVE: _ClassVar[Stream]
    STREAM_COPY: _ClassVar[Stream]
    STREAM_DATA: _ClassVar[Stream]
    STREAM_COPY_HD: _ClassVar[Stream]
    STREAM_GRADIENT: _ClassVar[Stream]
    STREAM_PARAMETER: _ClassVar[Stream]

class SegmentKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEGMENT_KIND_UNSPECIFIED: _ClassVar[SegmentKind]
    SEGMENT_KIND_STEP: _ClassVar[SegmentKind]
    SEGMENT_KIND_PROLOGUE: _ClassVar[SegmentKind]
    SEGMENT_KIND_FORWARD: _ClassVar[SegmentKind]
    SEGMENT_KIND_BACKWARD: _ClassVar[SegmentKind]
    SEGMENT_KIND_WEIGHT: _ClassVar[SegmentKind]
    SEGMENT_KIND_EPILOGUE: _ClassVar[SegmentKind]
    SEGMENT_KIND_FORWARD_BACKWARD: _ClassVar[SegmentKind]

class SpecKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPEC_KIND_NONE: _ClassVar[SpecKind]
    SPEC_KIND_COMPUTE: _ClassVar[SpecKind]
    SPEC_KIND_COLLECTIVE: _ClassVar[SpecKind]
    SPEC_KIND_COPY: _ClassVar[SpecKind]
    SPEC_KIND_SLICE: _ClassVar[SpecKind]
STREAM_UNSPECIFIED: Stream
STREAM_COMPUTE: Stream
STREAM_COLLECTIVE: Stream
STREAM_COPY: Stream
STREAM_DATA: Stream
STREAM_COPY_HD: Stream
STREAM_GRADIENT: Stream
STREAM_PARAMETER: Stream
SEGMENT_KIND_UNSPECIFIED: SegmentKind
SEGMENT_KIND_STEP: SegmentKind
SEGMENT_KIND_PROLOGUE: SegmentKind
SEGMENT_KIND_FORWARD: SegmentKind
SEGMENT_KIND_BACKWARD: SegmentKind
SEGMENT_KIND_WEIGHT: SegmentKind
SEGMENT_KIND_EPILOGUE: SegmentKind
SEGMENT_KIND_FORWARD_BACKWARD: SegmentKind
SPEC_KIND_NONE: SpecKind
SPEC_KIND_COMPUTE: SpecKind
SPEC_KIND_COLLECTIVE: SpecKind
SPEC_KIND_COPY: SpecKind
SPEC_KIND_SLICE: SpecKind

class Tasks(_message.Message):
    __slots__ = ("id", "kind", "stream", "name", "inputs", "outputs", "controls_in", "controls_out", "input_register", "output_register", "control_in_register", "control_out_register", "source", "spec", "compute_kind", "compute_attrs", "compute_inputs", "compute_outputs", "compute_input_shape", "compute_output_shape", "compute_input_regions", "compute_output_regions", "compute_input_region", "compute_output_region", "collective_primitive", "collective_communicator", "collective_reduction", "collective_src_axis", "collective_dst_axis", "copy_region", "slice_reduction", "slice_pieces", "piece_input", "piece_source", "piece_target", "segment", "compute_input_pieces", "compute_output_pieces", "compute_input_piece", "compute_output_piece", "compute_communicator", "compute_lanes")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_IN_FIELD_NUMBER: _ClassVar[int]
    CONTROLS_OUT_FIELD_NUMBER: _ClassVar[int]
    INPUT_REGISTER_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_REGISTER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_IN_REGISTER_FIELD_NUMBER: _ClassVar[int]
    CONTROL_OUT_REGISTER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_KIND_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_ATTRS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_REGIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_REGIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_REGION_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_REGION_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_PRIMITIVE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_REDUCTION_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_SRC_AXIS_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_DST_AXIS_FIELD_NUMBER: _ClassVar[int]
    COPY_REGION_FIELD_NUMBER: _ClassVar[int]
    SLICE_REDUCTION_FIELD_NUMBER: _ClassVar[int]
    SLICE_PIECES_FIELD_NUMBER: _ClassVar[int]
    PIECE_INPUT_FIELD_NUMBER: _ClassVar[int]
    PIECE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PIECE_TARGET_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_PIECES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_PIECES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_INPUT_PIECE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_OUTPUT_PIECE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_LANES_FIELD_NUMBER: _ClassVar[int]
    id: _containers.RepeatedScalarFieldContainer[int]
    kind: _containers.RepeatedScalarFieldContainer[_job_pb2.TaskKind]
    stream: _containers.RepeatedScalarFieldContainer[Stream]
    name: _containers.RepeatedScalarFieldContainer[int]
    inputs: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    controls_in: _containers.RepeatedScalarFieldContainer[int]
    controls_out: _containers.RepeatedScalarFieldContainer[int]
    input_register: _containers.RepeatedScalarFieldContainer[int]
    output_register: _containers.RepeatedScalarFieldContainer[int]
    control_in_register: _containers.RepeatedScalarFieldContainer[int]
    control_out_register: _containers.RepeatedScalarFieldContainer[int]
    source: _containers.RepeatedScalarFieldContainer[int]
    spec: _containers.RepeatedScalarFieldContainer[SpecKind]
    compute_kind: _containers.RepeatedScalarFieldContainer[int]
    compute_attrs: _containers.RepeatedScalarFieldContainer[int]
    compute_inputs: _containers.RepeatedScalarFieldContainer[int]
    compute_outputs: _containers.RepeatedScalarFieldContainer[int]
    compute_input_shape: _containers.RepeatedScalarFieldContainer[int]
    compute_output_shape: _containers.RepeatedScalarFieldContainer[int]
    compute_input_regions: _containers.RepeatedScalarFieldContainer[int]
    compute_output_regions: _containers.RepeatedScalarFieldContainer[int]
    compute_input_region: _containers.RepeatedScalarFieldContainer[int]
    compute_output_region: _containers.RepeatedScalarFieldContainer[int]
    collective_primitive: _containers.RepeatedScalarFieldContainer[_job_pb2.Primitive]
    collective_communicator: _containers.RepeatedScalarFieldContainer[int]
    collective_reduction: _containers.RepeatedScalarFieldContainer[_job_pb2.Reduction]
    collective_src_axis: _containers.RepeatedScalarFieldContainer[int]
    collective_dst_axis: _containers.RepeatedScalarFieldContainer[int]
    copy_region: _containers.RepeatedScalarFieldContainer[int]
    slice_reduction: _containers.RepeatedScalarFieldContainer[_job_pb2.Reduction]
    slice_pieces: _containers.RepeatedScalarFieldContainer[int]
    piece_input: _containers.RepeatedScalarFieldContainer[int]
    piece_source: _containers.RepeatedScalarFieldContainer[int]
    piece_target: _containers.RepeatedScalarFieldContainer[int]
    segment: _containers.RepeatedScalarFieldContainer[int]
    compute_input_pieces: _containers.RepeatedScalarFieldContainer[int]
    compute_output_pieces: _containers.RepeatedScalarFieldContainer[int]
    compute_input_piece: _containers.RepeatedScalarFieldContainer[int]
    compute_output_piece: _containers.RepeatedScalarFieldContainer[int]
    compute_communicator: _containers.RepeatedScalarFieldContainer[int]
    compute_lanes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Iterable[int]] = ..., kind: _Optional[_Iterable[_Union[_job_pb2.TaskKind, str]]] = ..., stream: _Optional[_Iterable[_Union[Stream, str]]] = ..., name: _Optional[_Iterable[int]] = ..., inputs: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ..., controls_in: _Optional[_Iterable[int]] = ..., controls_out: _Optional[_Iterable[int]] = ..., input_register: _Optional[_Iterable[int]] = ..., output_register: _Optional[_Iterable[int]] = ..., control_in_register: _Optional[_Iterable[int]] = ..., control_out_register: _Optional[_Iterable[int]] = ..., source: _Optional[_Iterable[int]] = ..., spec: _Optional[_Iterable[_Union[SpecKind, str]]] = ..., compute_kind: _Optional[_Iterable[int]] = ..., compute_attrs: _Optional[_Iterable[int]] = ..., compute_inputs: _Optional[_Iterable[int]] = ..., compute_outputs: _Optional[_Iterable[int]] = ..., compute_input_shape: _Optional[_Iterable[int]] = ..., compute_output_shape: _Optional[_Iterable[int]] = ..., compute_input_regions: _Optional[_Iterable[int]] = ..., compute_output_regions: _Optional[_Iterable[int]] = ..., compute_input_region: _Optional[_Iterable[int]] = ..., compute_output_region: _Optional[_Iterable[int]] = ..., collective_primitive: _Optional[_Iterable[_Union[_job_pb2.Primitive, str]]] = ..., collective_communicator: _Optional[_Iterable[int]] = ..., collective_reduction: _Optional[_Iterable[_Union[_job_pb2.Reduction, str]]] = ..., collective_src_axis: _Optional[_Iterable[int]] = ..., collective_dst_axis: _Optional[_Iterable[int]] = ..., copy_region: _Optional[_Iterable[int]] = ..., slice_reduction: _Optional[_Iterable[_Union[_job_pb2.Reduction, str]]] = ..., slice_pieces: _Optional[_Iterable[int]] = ..., piece_input: _Optional[_Iterable[int]] = ..., piece_source: _Optional[_Iterable[int]] = ..., piece_target: _Optional[_Iterable[int]] = ..., segment: _Optional[_Iterable[int]] = ..., compute_input_pieces: _Optional[_Iterable[int]] = ..., compute_output_pieces: _Optional[_Iterable[int]] = ..., compute_input_piece: _Optional[_Iterable[int]] = ..., compute_output_piece: _Optional[_Iterable[int]] = ..., compute_communicator: _Optional[_Iterable[int]] = ..., compute_lanes: _Optional[_Iterable[int]] = ...) -> None: ...

class Registers(_message.Message):
    __slots__ = ("id", "name", "shape", "dtype", "sbp", "producer", "consumers", "consumer", "block", "offset", "nbytes", "register_count", "inplace_of", "sync_id", "is_view", "per_microbatch")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    REGISTER_COUNT_FIELD_NUMBER: _ClassVar[int]
    INPLACE_OF_FIELD_NUMBER: _ClassVar[int]
    SYNC_ID_FIELD_NUMBER: _ClassVar[int]
    IS_VIEW_FIELD_NUMBER: _ClassVar[int]
    PER_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    id: _containers.RepeatedScalarFieldContainer[int]
    name: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _containers.RepeatedScalarFieldContainer[_job_pb2.DType]
    sbp: _containers.RepeatedScalarFieldContainer[int]
    producer: _containers.RepeatedScalarFieldContainer[int]
    consumers: _containers.RepeatedScalarFieldContainer[int]
    consumer: _containers.RepeatedScalarFieldContainer[int]
    block: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    register_count: _containers.RepeatedScalarFieldContainer[int]
    inplace_of: _containers.RepeatedScalarFieldContainer[int]
    sync_id: _containers.RepeatedScalarFieldContainer[int]
    is_view: _containers.RepeatedScalarFieldContainer[bool]
    per_microbatch: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, id: _Optional[_Iterable[int]] = ..., name: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Iterable[_Union[_job_pb2.DType, str]]] = ..., sbp: _Optional[_Iterable[int]] = ..., producer: _Optional[_Iterable[int]] = ..., consumers: _Optional[_Iterable[int]] = ..., consumer: _Optional[_Iterable[int]] = ..., block: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., nbytes: _Optional[_Iterable[int]] = ..., register_count: _Optional[_Iterable[int]] = ..., inplace_of: _Optional[_Iterable[int]] = ..., sync_id: _Optional[_Iterable[int]] = ..., is_view: _Optional[_Iterable[bool]] = ..., per_microbatch: _Optional[_Iterable[bool]] = ...) -> None: ...

class RemoteRegisters(_message.Message):
    __slots__ = ("id", "sync_id", "name", "shape", "dtype", "producer", "consumers", "consumer", "per_microbatch")
    ID_FIELD_NUMBER: _ClassVar[int]
    SYNC_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    PER_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    id: _containers.RepeatedScalarFieldContainer[int]
    sync_id: _containers.RepeatedScalarFieldContainer[int]
    name: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _containers.RepeatedScalarFieldContainer[_job_pb2.DType]
    producer: _containers.RepeatedScalarFieldContainer[int]
    consumers: _containers.RepeatedScalarFieldContainer[int]
    consumer: _containers.RepeatedScalarFieldContainer[int]
    per_microbatch: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, id: _Optional[_Iterable[int]] = ..., sync_id: _Optional[_Iterable[int]] = ..., name: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Iterable[_Union[_job_pb2.DType, str]]] = ..., producer: _Optional[_Iterable[int]] = ..., consumers: _Optional[_Iterable[int]] = ..., consumer: _Optional[_Iterable[int]] = ..., per_microbatch: _Optional[_Iterable[bool]] = ...) -> None: ...

class Segments(_message.Message):
    __slots__ = ("kind", "chunk", "slot_segment", "slot_microbatch")
    KIND_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SLOT_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    SLOT_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    kind: _containers.RepeatedScalarFieldContainer[SegmentKind]
    chunk: _containers.RepeatedScalarFieldContainer[int]
    slot_segment: _containers.RepeatedScalarFieldContainer[int]
    slot_microbatch: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Iterable[_Union[SegmentKind, str]]] = ..., chunk: _Optional[_Iterable[int]] = ..., slot_segment: _Optional[_Iterable[int]] = ..., slot_microbatch: _Optional[_Iterable[int]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("index", "purpose", "shared", "nbytes", "device")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PURPOSE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    index: _containers.RepeatedScalarFieldContainer[int]
    purpose: _containers.RepeatedScalarFieldContainer[int]
    shared: _containers.RepeatedScalarFieldContainer[bool]
    nbytes: _containers.RepeatedScalarFieldContainer[int]
    device: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[_Iterable[int]] = ..., purpose: _Optional[_Iterable[int]] = ..., shared: _Optional[_Iterable[bool]] = ..., nbytes: _Optional[_Iterable[int]] = ..., device: _Optional[_Iterable[int]] = ...) -> None: ...

class Communicators(_message.Message):
    __slots__ = ("ranks", "rank", "families", "family", "stream")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    rank: _containers.RepeatedScalarFieldContainer[int]
    families: _containers.RepeatedScalarFieldContainer[int]
    family: _containers.RepeatedScalarFieldContainer[int]
    stream: _containers.RepeatedScalarFieldContainer[Stream]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., rank: _Optional[_Iterable[int]] = ..., families: _Optional[_Iterable[int]] = ..., family: _Optional[_Iterable[int]] = ..., stream: _Optional[_Iterable[_Union[Stream, str]]] = ...) -> None: ...

class Variables(_message.Message):
    __slots__ = ("name", "register", "shape", "dtype", "placement", "sbp", "region", "attrs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[int]
    register: _containers.RepeatedScalarFieldContainer[int]
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: _containers.RepeatedScalarFieldContainer[_job_pb2.DType]
    placement: _containers.RepeatedScalarFieldContainer[int]
    sbp: _containers.RepeatedScalarFieldContainer[int]
    region: _containers.RepeatedScalarFieldContainer[int]
    attrs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Iterable[int]] = ..., register: _Optional[_Iterable[int]] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[_Iterable[_Union[_job_pb2.DType, str]]] = ..., placement: _Optional[_Iterable[int]] = ..., sbp: _Optional[_Iterable[int]] = ..., region: _Optional[_Iterable[int]] = ..., attrs: _Optional[_Iterable[int]] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("name", "task", "register")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    REGISTER_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[int]
    task: _containers.RepeatedScalarFieldContainer[int]
    register: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[_Iterable[int]] = ..., task: _Optional[_Iterable[int]] = ..., register: _Optional[_Iterable[int]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("job", "rank", "world_size", "seed", "peak_live_bytes", "id_base", "tables", "tasks", "registers", "remote_registers", "blocks", "communicators", "variables", "outputs", "schedule", "microbatches", "segments")
    JOB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PEAK_LIVE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ID_BASE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    REGISTERS_FIELD_NUMBER: _ClassVar[int]
    REMOTE_REGISTERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATORS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    job: str
    rank: int
    world_size: int
    seed: int
    peak_live_bytes: int
    id_base: int
    tables: _job_pb2.Tables
    tasks: Tasks
    registers: Registers
    remote_registers: RemoteRegisters
    blocks: Blocks
    communicators: Communicators
    variables: Variables
    outputs: Outputs
    schedule: str
    microbatches: int
    segments: Segments
    def __init__(self, job: _Optional[str] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., seed: _Optional[int] = ..., peak_live_bytes: _Optional[int] = ..., id_base: _Optional[int] = ..., tables: _Optional[_Union[_job_pb2.Tables, _Mapping]] = ..., tasks: _Optional[_Union[Tasks, _Mapping]] = ..., registers: _Optional[_Union[Registers, _Mapping]] = ..., remote_registers: _Optional[_Union[RemoteRegisters, _Mapping]] = ..., blocks: _Optional[_Union[Blocks, _Mapping]] = ..., communicators: _Optional[_Union[Communicators, _Mapping]] = ..., variables: _Optional[_Union[Variables, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., schedule: _Optional[str] = ..., microbatches: _Optional[int] = ..., segments: _Optional[_Union[Segments, _Mapping]] = ...) -> None: ...
