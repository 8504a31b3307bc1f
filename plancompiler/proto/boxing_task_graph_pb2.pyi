from plancompiler.proto import job_pb2 as _job_pb2
from plancompiler.proto import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlacedGraph(_message.Message):
    __slots__ = ("job_name", "seed", "world_size", "tables", "ops", "op_family", "op_signature", "op_sources", "op_source_family", "op_source_slot", "signature_inputs", "signature_outputs", "signature_sbp", "family_number", "family_kind", "family_name", "family_placement", "family_source", "family_inputs", "family_input_family", "family_input_slot", "family_outputs", "family_output_shape", "family_output_dtype", "family_output_sbp", "family_transfers", "transfer_primitive", "transfer_mesh_axes", "transfer_mesh_axis", "transfer_reduction", "transfer_src_axis", "transfer_dst_axis", "transfer_src_placement", "transfer_src_sbp", "transfer_late", "schedule", "microbatches", "stages", "chunks", "op_micro", "micro_segment", "micro_inputs", "micro_outputs", "micro_sbp", "family_segment", "family_per_microbatch", "transfer_stream")
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    OP_FAMILY_FIELD_NUMBER: _ClassVar[int]
    OP_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    OP_SOURCES_FIELD_NUMBER: _ClassVar[int]
    OP_SOURCE_FAMILY_FIELD_NUMBER: _ClassVar[int]
    OP_SOURCE_SLOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_INPUTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_SBP_FIELD_NUMBER: _ClassVar[int]
    FAMILY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    FAMILY_KIND_FIELD_NUMBER: _ClassVar[int]
    FAMILY_NAME_FIELD_NUMBER: _ClassVar[int]
    FAMILY_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_INPUTS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_INPUT_FAMILY_FIELD_NUMBER: _ClassVar[int]
    FAMILY_INPUT_SLOT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_OUTPUT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_OUTPUT_SBP_FIELD_NUMBER: _ClassVar[int]
    FAMILY_TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_PRIMITIVE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MESH_AXES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MESH_AXIS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_REDUCTION_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SRC_AXIS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_DST_AXIS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SRC_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SRC_SBP_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_LATE_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    OP_MICRO_FIELD_NUMBER: _ClassVar[int]
    MICRO_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    MICRO_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MICRO_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MICRO_SBP_FIELD_NUMBER: _ClassVar[int]
    FAMILY_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_PER_MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_STREAM_FIELD_NUMBER: _ClassVar[int]
    job_name: str
    seed: int
    world_size: int
    tables: _job_pb2.Tables
    ops: _job_pb2.Ops
    op_family: _containers.RepeatedScalarFieldContainer[int]
    op_signature: _containers.RepeatedScalarFieldContainer[int]
    op_sources: _containers.RepeatedScalarFieldContainer[int]
    op_source_family: _containers.RepeatedScalarFieldContainer[int]
    op_source_slot: _containers.RepeatedScalarFieldContainer[int]
    signature_inputs: _containers.RepeatedScalarFieldContainer[int]
    signature_outputs: _containers.RepeatedScalarFieldContainer[int]
    signature_sbp: _containers.RepeatedScalarFieldContainer[int]
    family_number: _containers.RepeatedScalarFieldContainer[int]
    family_kind: _containers.RepeatedScalarFieldContainer[_job_pb2.TaskKind]
    family_name: _containers.RepeatedScalarFieldContainer[int]
    family_placement: _containers.RepeatedScalarFieldContainer[int]
    family_source: _containers.RepeatedScalarFieldContainer[int]
    family_inputs: _containers.RepeatedScalarFieldContainer[int]
    family_input_family: _containers.RepeatedScalarFieldContainer[int]
    family_input_slot: _containers.RepeatedScalarFieldContainer[int]
    family_outputs: _containers.RepeatedScalarFieldContainer[int]
    family_output_shape: _containers.RepeatedScalarFieldContainer[int]
    family_output_dtype: _containers.RepeatedScalarFieldContainer[_job_pb2.DType]
    family_output_sbp: _containers.RepeatedScalarFieldContainer[int]
    family_transfers: _containers.RepeatedScalarFieldContainer[int]
    transfer_primitive: _containers.RepeatedScalarFieldContainer[_job_pb2.Primitive]
    transfer_mesh_axes: _containers.RepeatedScalarFieldContainer[int]
    transfer_mesh_axis: _containers.RepeatedScalarFieldContainer[int]
    transfer_reduction: _containers.RepeatedScalarFieldContainer[_job_pb2.Reduction]
    transfer_src_axis: _containers.RepeatedScalarFieldContainer[int]
    transfer_dst_axis: _containers.RepeatedScalarFieldContainer[int]
    transfer_src_placement: _containers.RepeatedScalarFieldContainer[int]
    transfer_src_sbp: _containers.RepeatedScalarFieldContainer[int]
    transfer_late: _containers.RepeatedScalarFieldContainer[int]
    schedule: str
    microbatches: int
    stages: int
    chunks: int
    op_micro: _containers.RepeatedScalarFieldContainer[int]
    micro_segment: _containers.RepeatedScalarFieldContainer[int]
    micro_inputs: _containers.RepeatedScalarFieldContainer[int]
    micro_outputs: _containers.RepeatedScalarFieldContainer[int]
    micro_sbp: _containers.RepeatedScalarFieldContainer[int]
    family_segment: _containers.RepeatedScalarFieldContainer[int]
    family_per_microbatch: _containers.RepeatedScalarFieldContainer[int]
    transfer_stream: _containers.RepeatedScalarFieldContainer[_plan_pb2.Stream]
    def __init__(self, job_name: _Optional[str] = ..., seed: _Optional[int] = ..., world_size: _Optional[int] = ..., tables: _Optional[_Union[_job_pb2.Tables, _Mapping]] = ..., ops: _Optional[_Union[_job_pb2.Ops, _Mapping]] = ..., op_family: _Optional[_Iterable[int]] = ..., op_signature: _Optional[_Iterable[int]] = ..., op_sources: _Optional[_Iterable[int]] = ..., op_source_family: _Optional[_Iterable[int]] = ..., op_source_slot: _Optional[_Iterable[int]] = ..., signature_inputs: _Optional[_Iterable[int]] = ..., signature_outputs: _Optional[_Iterable[int]] = ..., signature_sbp: _Optional[_Iterable[int]] = ..., family_number: _Optional[_Iterable[int]] = ..., family_kind: _Optional[_Iterable[_Union[_job_pb2.TaskKind, str]]] = ..., family_name: _Optional[_Iterable[int]] = ..., family_placement: _Optional[_Iterable[int]] = ..., family_source: _Optional[_Iterable[int]] = ..., family_inputs: _Optional[_Iterable[int]] = ..., family_input_family: _Optional[_Iterable[int]] = ..., family_input_slot: _Optional[_Iterable[int]] = ..., family_outputs: _Optional[_Iterable[int]] = ..., family_output_shape: _Optional[_Iterable[int]] = ..., family_output_dtype: _Optional[_Iterable[_Union[_job_pb2.DType, str]]] = ..., family_output_sbp: _Optional[_Iterable[int]] = ..., family_transfers: _Optional[_Iterable[int]] = ..., transfer_primitive: _Optional[_Iterable[_Union[_job_pb2.Primitive, str]]] = ..., transfer_mesh_axes: _Optional[_Iterable[int]] = ..., transfer_mesh_axis: _Optional[_Iterable[int]] = ..., transfer_reduction: _Optional[_Iterable[_Union[_job_pb2.Reduction, str]]] = ..., transfer_src_axis: _Optional[_Iterable[int]] = ..., transfer_dst_axis: _Optional[_Iterable[int]] = ..., transfer_src_placement: _Optional[_Iterable[int]] = ..., transfer_src_sbp: _Optional[_Iterable[int]] = ..., transfer_late: _Optional[_Iterable[int]] = ..., schedule: _Optional[str] = ..., microbatches: _Optional[int] = ..., stages: _Optional[int] = ..., chunks: _Optional[int] = ..., op_micro: _Optional[_Iterable[int]] = ..., micro_segment: _Optional[_Iterable[int]] = ..., micro_inputs: _Optional[_Iterable[int]] = ..., micro_outputs: _Optional[_Iterable[int]] = ..., micro_sbp: _Optional[_Iterable[int]] = ..., family_segment: _Optional[_Iterable[int]] = ..., family_per_microbatch: _Optional[_Iterable[int]] = ..., transfer_stream: _Optional[_Iterable[_Union[_plan_pb2.Stream, str]]] = ...) -> None: ...

class BoxingTaskGraph(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: PlacedGraph
    def __init__(self, body: _Optional[_Union[PlacedGraph, _Mapping]] = ...) -> None: ...

class RankSlice(_message.Message):
    __slots__ = ("body",)
    BODY_FIELD_NUMBER: _ClassVar[int]
    body: PlacedGraph
    def __init__(self, body: _Optional[_Union[PlacedGraph, _Mapping]] = ...) -> None: ...
