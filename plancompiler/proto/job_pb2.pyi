from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_BOOL: _ClassVar[DType]
    DTYPE_UINT8: _ClassVar[DType]
    DTYPE_INT8: _ClassVar[DType]
    DTYPE_INT16: _ClassVar[DType]
    DTYPE_INT32: _ClassVar[DType]
    DTYPE_INT64: _ClassVar[DType]
    DTYPE_FLOAT16: _ClassVar[DType]
    DTYPE_FLOAT32: _ClassVar[DType]
    DTYPE_FLOAT64: _ClassVar[DType]
    DTYPE_BFLOAT16: _ClassVar[DType]
    DTYPE_UINT16: _ClassVar[DType]
    DTYPE_UINT32: _ClassVar[DType]
    DTYPE_UINT64: _ClassVar[DType]

class Reduction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDUCTION_NONE: _ClassVar[Reduction]
    REDUCTION_SUM: _ClassVar[Reduction]
    REDUCTION_MAX: _ClassVar[Reduction]
    REDUCTION_MIN: _ClassVar[Reduction]
    REDUCTION_PROD: _ClassVar[Reduction]
    REDUCTION_AVG: _ClassVar[Reduction]

class Primitive(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRIMITIVE_UNSPECIFIED: _ClassVar[Primitive]
    PRIMITIVE_ALL_REDUCE: _ClassVar[Primitive]
    PRIMITIVE_REDUCE_SCATTER: _ClassVar[Primitive]
    PRIMITIVE_ALL_GATHER: _ClassVar[Primitive]
    PRIMITIVE_ALL_TO_ALL: _ClassVar[Primitive]
    PRIMITIVE_SLICE: _ClassVar[Primitive]
    PRIMITIVE_PARTIALISE: _ClassVar[Primitive]
    PRIMITIVE_COPY: _ClassVar[Primitive]
    PRIMITIVE_EXCHANGE: _ClassVar[Primitive]

class TaskKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_KIND_UNSPECIFIED: _ClassVar[TaskKind]
    TASK_KIND_COMPUTE: _ClassVar[TaskKind]
    TASK_KIND_INPUT: _ClassVar[TaskKind]
    TASK_KIND_VARIABLE: _ClassVar[TaskKind]
    TASK_KIND_OUTPUT: _ClassVar[TaskKind]
    TASK_KIND_COLLECTIVE_BOXING: _ClassVar[TaskKind]
    TASK_KIND_COPY_COMM_NET: _ClassVar[TaskKind]
    TASK_KIND_COPY_HD: _ClassVar[TaskKind]
    TASK_KIND_SEND_RECV: _ClassVar[TaskKind]
    TASK_KIND_SLICE_BOXING: _ClassVar[TaskKind]
    TASK_KIND_BOXING_ZEROS: _ClassVar[TaskKind]
    TASK_KIND_BOXING_IDENTITY: _ClassVar[TaskKind]
    TASK_KIND_STEP_END: _ClassVar[TaskKind]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_FORWARD: _ClassVar[Phase]
    PHASE_BACKWARD: _ClassVar[Phase]
    PHASE_UPDATE: _ClassVar[Phase]

class AttrType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTR_TYPE_UNSPECIFIED: _ClassVar[AttrType]
    ATTR_TYPE_BOOL: _ClassVar[AttrType]
    ATTR_TYPE_INT: _ClassVar[AttrType]
    ATTR_TYPE_FLOAT: _ClassVar[AttrType]
    ATTR_TYPE_STRING: _ClassVar[AttrType]
    ATTR_TYPE_TUPLE: _ClassVar[AttrType]
DTYPE_UNSPECIFIED: DType
DTYPE_BOOL: DType
DTYPE_UINT8: DType
DTYPE_INT8: DType
DTYPE_INT16: DType
DTYPE_INT32: DType
DTYPE_INT64: DType
DTYPE_FLOAT16: DType
DTYPE_FLOAT32: DType
DTYPE_FLOAT64: DType
DTYPE_BFLOAT16: DType
DTYPE_UINT16: DType
DTYPE_UINT32: DType
DTYPE_UINT64: DType
REDUCTION_NONE: Reduction
REDUCTION_SUM: Reduction
REDUCTION_MAX: Reduction
REDUCTION_MIN: Reduction
REDUCTION_PROD: Reduction
REDUCTION_AVG: Reduction
PRIMITIVE_UNSPECIFIED: Primitive
PRIMITIVE_ALL_REDUCE: Primitive
PRIMITIVE_REDUCE_SCATTER: Primitive
PRIMITIVE_ALL_GATHER: Primitive
PRIMITIVE_ALL_TO_ALL: Primitive
PRIMITIVE_SLICE: Primitive
PRIMITIVE_PARTIALISE: Primitive
PRIMITIVE_COPY: Primitive
PRIMITIVE_EXCHANGE: Primitive
TASK_KIND_UNSPECIFIED: TaskKind
TASK_KIND_COMPUTE: TaskKind
TASK_KIND_INPUT: TaskKind
TASK_KIND_VARIABLE: TaskKind
TASK_KIND_OUTPUT: TaskKind
TASK_KIND_COLLECTIVE_BOXING: TaskKind
TASK_KIND_COPY_COMM_NET: TaskKind
TASK_KIND_COPY_HD: TaskKind
TASK_KIND_SEND_RECV: TaskKind
TASK_KIND_SLICE_BOXING: TaskKind
TASK_KIND_BOXING_ZEROS: TaskKind
TASK_KIND_BOXING_IDENTITY: TaskKind
TASK_KIND_STEP_END: TaskKind
PHASE_UNSPECIFIED: Phase
PHASE_FORWARD: Phase
PHASE_BACKWARD: Phase
PHASE_UPDATE: Phase
ATTR_TYPE_UNSPECIFIED: AttrType
ATTR_TYPE_BOOL: AttrType
ATTR_TYPE_INT: AttrType
ATTR_TYPE_FLOAT: AttrType
ATTR_TYPE_STRING: AttrType
ATTR_TYPE_TUPLE: AttrType

class Tables(_message.Message):
    __slots__ = ("strings", "placement_device", "placement_ndim", "placement_extent", "placement_named", "placement_axis_name", "placement_runs", "run_start", "run_length", "run_stride", "shape_ndim", "shape_extent", "region_ndim", "region_start", "region_stop", "sbp", "source_file", "source_line", "attr_count", "attr_name", "attr_type", "tuple_length", "item_type", "int_value", "float_value", "string_value", "origin_phase", "origin_region", "origin_checkpoint", "origin_stage")
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_DEVICE_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NDIM_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_EXTENT_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_NAMED_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_AXIS_NAME_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_RUNS_FIELD_NUMBER: _ClassVar[int]
    RUN_START_FIELD_NUMBER: _ClassVar[int]
    RUN_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RUN_STRIDE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_NDIM_FIELD_NUMBER: _ClassVar[int]
    SHAPE_EXTENT_FIELD_NUMBER: _ClassVar[int]
    REGION_NDIM_FIELD_NUMBER: _ClassVar[int]
    REGION_START_FIELD_NUMBER: _ClassVar[int]
    REGION_STOP_FIELD_NUMBER: _ClassVar[int]
    SBP_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FILE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LINE_FIELD_NUMBER: _ClassVar[int]
    ATTR_COUNT_FIELD_NUMBER: _ClassVar[int]
    ATTR_NAME_FIELD_NUMBER: _ClassVar[int]
    ATTR_TYPE_FIELD_NUMBER: _ClassVar[int]
    TUPLE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ITEM_TYPE_FIELD_NUMBER: _ClassVar[int]
    INT_VALUE_FIELD_NUMBER: _ClassVar[int]
    FLOAT_VALUE_FIELD_NUMBER: _ClassVar[int]
    STRING_VALUE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_PHASE_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_REGION_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_STAGE_FIELD_NUMBER: _ClassVar[int]
    strings: _containers.RepeatedScalarFieldContainer[str]
    placement_device: _containers.RepeatedScalarFieldContainer[int]
    placement_ndim: _containers.RepeatedScalarFieldContainer[int]
    placement_extent: _containers.RepeatedScalarFieldContainer[int]
    placement_named: _containers.RepeatedScalarFieldContainer[int]
    placement_axis_name: _containers.RepeatedScalarFieldContainer[int]
    placement_runs: _containers.RepeatedScalarFieldContainer[int]
    run_start: _containers.RepeatedScalarFieldContainer[int]
    run_length: _containers.RepeatedScalarFieldContainer[int]
    run_stride: _containers.RepeatedScalarFieldContainer[int]
    shape_ndim: _containers.RepeatedScalarFieldContainer[int]
    shape_extent: _containers.RepeatedScalarFieldContainer[int]
    region_ndim: _containers.RepeatedScalarFieldContainer[int]
    region_start: _containers.RepeatedScalarFieldContainer[int]
    region_stop: _containers.RepeatedScalarFieldContainer[int]
    sbp: _containers.RepeatedScalarFieldContainer[int]
    source_file: _containers.RepeatedScalarFieldContainer[int]
    source_line: _containers.RepeatedScalarFieldContainer[int]
    attr_count: _containers.RepeatedScalarFieldContainer[int]
    attr_name: _containers.RepeatedScalarFieldContainer[int]
    attr_type: _containers.RepeatedScalarFieldContainer[AttrType]
    tuple_length: _containers.RepeatedScalarFieldContainer[int]
    item_type: _containers.RepeatedScalarFieldContainer[AttrType]
    int_value: _containers.RepeatedScalarFieldContainer[int]
    float_value: _containers.RepeatedScalarFieldContainer[float]
    string_value: _containers.RepeatedScalarFieldContainer[int]
    origin_phase: _containers.RepeatedScalarFieldContainer[Phase]
    origin_region: _containers.RepeatedScalarFieldContainer[int]
    origin_checkpoint: _containers.RepeatedScalarFieldContainer[int]
    origin_stage: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, strings: _Optional[_Iterable[str]] = ..., placement_device: _Optional[_Iterable[int]] = ..., placement_ndim: _Optional[_Iterable[int]] = ..., placement_extent: _Optional[_Iterable[int]] = ..., placement_named: _Optional[_Iterable[int]] = ..., placement_axis_name: _Optional[_Iterable[int]] = ..., placement_runs: _Optional[_Iterable[int]] = ..., run_start: _Optional[_Iterable[int]] = ..., run_length: _Optional[_Iterable[int]] = ..., run_stride: _Optional[_Iterable[int]] = ..., shape_ndim: _Optional[_Iterable[int]] = ..., shape_extent: _Optional[_Iterable[int]] = ..., region_ndim: _Optional[_Iterable[int]] = ..., region_start: _Optional[_Iterable[int]] = ..., region_stop: _Optional[_Iterable[int]] = ..., sbp: _Optional[_Iterable[int]] = ..., source_file: _Optional[_Iterable[int]] = ..., source_line: _Optional[_Iterable[int]] = ..., attr_count: _Optional[_Iterable[int]] = ..., attr_name: _Optional[_Iterable[int]] = ..., attr_type: _Optional[_Iterable[_Union[AttrType, str]]] = ..., tuple_length: _Optional[_Iterable[int]] = ..., item_type: _Optional[_Iterable[_Union[AttrType, str]]] = ..., int_value: _Optional[_Iterable[int]] = ..., float_value: _Optional[_Iterable[float]] = ..., string_value: _Optional[_Iterable[int]] = ..., origin_phase: _Optional[_Iterable[_Union[Phase, str]]] = ..., origin_region: _Optional[_Iterable[int]] = ..., origin_checkpoint: _Optional[_Iterable[int]] = ..., origin_stage: _Optional[_Iterable[int]] = ...) -> None: ...

class Ops(_message.Message):
    __slots__ = ("value_name", "value_shape", "value_dtype", "value_placement", "op_name", "op_kind", "op_inputs", "op_outputs", "op_attrs", "op_placement", "op_sbp", "op_source", "op_origin", "input_value", "output_value")
    VALUE_NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    VALUE_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    OP_NAME_FIELD_NUMBER: _ClassVar[int]
    OP_KIND_FIELD_NUMBER: _ClassVar[int]
    OP_INPUTS_FIELD_NUMBER: _ClassVar[int]
    OP_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    OP_ATTRS_FIELD_NUMBER: _ClassVar[int]
    OP_PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    OP_SBP_FIELD_NUMBER: _ClassVar[int]
    OP_SOURCE_FIELD_NUMBER: _ClassVar[int]
    OP_ORIGIN_FIELD_NUMBER: _ClassVar[int]
    INPUT_VALUE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_VALUE_FIELD_NUMBER: _ClassVar[int]
    value_name: _containers.RepeatedScalarFieldContainer[int]
    value_shape: _containers.RepeatedScalarFieldContainer[int]
    value_dtype: _containers.RepeatedScalarFieldContainer[DType]
    value_placement: _containers.RepeatedScalarFieldContainer[int]
    op_name: _containers.RepeatedScalarFieldContainer[int]
    op_kind: _containers.RepeatedScalarFieldContainer[int]
    op_inputs: _containers.RepeatedScalarFieldContainer[int]
    op_outputs: _containers.RepeatedScalarFieldContainer[int]
    op_attrs: _containers.RepeatedScalarFieldContainer[int]
    op_placement: _containers.RepeatedScalarFieldContainer[int]
    op_sbp: _containers.RepeatedScalarFieldContainer[int]
    op_source: _containers.RepeatedScalarFieldContainer[int]
    op_origin: _containers.RepeatedScalarFieldContainer[int]
    input_value: _containers.RepeatedScalarFieldContainer[int]
    output_value: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, value_name: _Optional[_Iterable[int]] = ..., value_shape: _Optional[_Iterable[int]] = ..., value_dtype: _Optional[_Iterable[_Union[DType, str]]] = ..., value_placement: _Optional[_Iterable[int]] = ..., op_name: _Optional[_Iterable[int]] = ..., op_kind: _Optional[_Iterable[int]] = ..., op_inputs: _Optional[_Iterable[int]] = ..., op_outputs: _Optional[_Iterable[int]] = ..., op_attrs: _Optional[_Iterable[int]] = ..., op_placement: _Optional[_Iterable[int]] = ..., op_sbp: _Optional[_Iterable[int]] = ..., op_source: _Optional[_Iterable[int]] = ..., op_origin: _Optional[_Iterable[int]] = ..., input_value: _Optional[_Iterable[int]] = ..., output_value: _Optional[_Iterable[int]] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("name", "seed", "tables", "ops", "config")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TABLES_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    name: str
    seed: int
    tables: Tables
    ops: Ops
    config: str
    def __init__(self, name: _Optional[str] = ..., seed: _Optional[int] = ..., tables: _Optional[_Union[Tables, _Mapping]] = ..., ops: _Optional[_Union[Ops, _Mapping]] = ..., config: _Optional[str] = ...) -> None: ...
