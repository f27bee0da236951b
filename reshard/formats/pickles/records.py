"""Inert records of what a pickle refers to and calls, and the short list of what it may refer to."""

from typing import Any

METADATA = "torch.distributed.checkpoint.metadata"

# Names that a checkpoint's pickles may hold. None of them is ever called: each stands for an inert
# record.
ALLOWED = {
    *((METADATA, n)
      for n in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
                "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    *(("torch.distributed.checkpoint.planner", n)
      for n in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    ("torch.serialization", "_get_layout"),
    *(("torch", n) for n in ("device", "Generator", "strided", "contiguous_format")),
    *(("torch", n)
      for n in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16",
                "int8", "uint8", "bool", "complex64")),
    *(("torch", f"{n}Storage")
      for n in ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")),
    *(("torch.storage", n) for n in ("UntypedStorage", "TypedStorage", "_load_from_bytes")),
    *(("torch._utils", n) for n in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")),
    *(("torch.distributed.tensor", n) for n in ("DTensor",)), ("torch._utils", "_rebuild_wrapper_subclass"),
    *(("torch.distributed.tensor._dtensor_spec", n) for n in ("DTensorSpec", "ShardOrderEntry", "TensorMeta")),
    *(("torch.distributed.tensor.placement_types", n) for n in ("Shard", "Replicate", "_StridedShard", "Partial")),
    ("torch.distributed.device_mesh", "DeviceMesh"), ("torch.distributed._mesh_layout", "_MeshLayout"),
    ("torch._C", "Generator"), ("torch._tensor", "_rebuild_from_type_v2"), ("torch.serialization", "_get_dtype"),
    *((module, n) for module in ("numpy.core.multiarray", "numpy._core.multiarray")
      for n in ("_reconstruct", "scalar")),
    ("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.dtypes", "UInt32DType"),
    ("argparse", "Namespace"), ("types", "SimpleNamespace"), ("signal", "Signals"),
    *((module, n) for module in ("pathlib", "pathlib._local")
      for n in ("PosixPath", "PurePosixPath")),  # of Python 3.13 the second
    ("_codecs", "encode"), ("io", "BytesIO"), ("_io", "BytesIO"), ("builtins", "set"), ("builtins", "frozenset"),
    ("builtins", "slice"),
    *(("megatron.core.transformer.enums", n)
      for n in ("AttnBackend", "CudaGraphModule", "CudaGraphScope", "InferenceCudaGraphScope",
                "LayerType", "AttnMaskType", "ModelType")),
    ("megatron.core.enums", "ModelType"), ("megatron.core.optimizer.optimizer_config", "OptimizerConfig"),
    *(("megatron.core.rerun_state_machine", n) for n in ("RerunDiagnostic", "RerunMode", "RerunState")),
    ("megatron.core.transformer.pipeline_parallel_layer_layout", "PipelineParallelLayerLayout"),
}  # fmt: skip


class Name:
    """A name that a pickle refers to without calling it, such as the dtype ``torch.bfloat16``."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


class Call:
    """The inert record of a call that a pickle wants: the name, the arguments and the state set
    afterward.

    Subclasses stand for one name each (the unpickler insists on classes); `fields` is the state
    where that is a dict.
    """

    __slots__ = ("args", "state")
    module = name = ""
    args: tuple
    state: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> "Call":
        call = object.__new__(cls)
        call.args, call.state = args, None
        return call

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2 and state[0] is None and isinstance(state[1], dict):
            state = state[1]
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes that the pickle sets."""
        return self.state if isinstance(self.state, dict) else {}

    def __repr__(self) -> str:
        # arguments may share parts in a way that takes forever to print
        return f"{self.module}.{self.name}(...)"

    def __hash__(self) -> int:
        return id(self)


def call(module: str, name: str, *args: Any, state: Any = None) -> Call:
    """Return a record of ``module.name(*args)``, with `state` set on the result, for `dump`."""
    record = record_class(module, name)(*args)
    record.state = state
    return record


_CLASSES: dict[tuple[str, str], type[Call]] = {}


def record_class(module: str, name: str) -> type[Call]:
    """Return the class of the records of calls of one name."""
    record = _CLASSES.get((module, name))
    if record is None:
        record = _CLASSES[module, name] = type(
            name, (Call,), {"__slots__": (), "module": module, "name": name}
        )
    return record


class Persistent:
    """An object that the reader looks up by `pid`, such as a tensor's storage."""

    __slots__ = ("pid",)

    def __init__(self, pid: Any) -> None:
        self.pid = pid
