"""Models in folders of Hugging Face's form: `config.json` beside safetensors files. The one file
that imports transformers.

The configuration names a class of transformers, which is made on the meta device and imported like
any module. Code that a folder may bring is not run.
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plancompiler.errors import DataError, ModelImportError, UsageError
from plancompiler.frontend.weights import CONFIGURATIONS, load_weights, weight_entries
from plancompiler.importers.imported_module import ImportedModel
from plancompiler.importers.torch_reader import from_torch
from plancompiler.ir.arguments import is_file

_LABELS_OF_CLASSES = ("ForImageClassification", "ForSequenceClassification")


def from_folder(folder: Path, batch: int, length: int, parts: bool = False) -> ImportedModel:
    """The model of a folder, with its weights, for batches of `batch` examples of `length` tokens
    or of images; it computes the loss where its class has labels. `parts` is that of `from_torch`.

    ModelImportError where the folder has no configuration of a class of transformers, or one that
    needs other inputs; DataError where its weights do not fit.
    """
    transformers = _transformers()
    if not is_file(folder / CONFIGURATIONS[0]):
        raise ModelImportError(
            "a folder of a model has no configuration",
            got=str(folder),
            expected="config.json, and safetensors files",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, config = _class_of(transformers, folder)
        torch = importlib.import_module("torch")
        with torch.device("meta"):
            module = kind(config).to(torch.float32).eval()
        example = _example(torch, kind, config, batch, length)
        model = from_torch(module, example, parts=parts)
        entries = weight_entries(folder)
        names = _names_in(module, model)
        if {names(entry) for entry in entries} <= {None, *model.tensors}:
            load_weights(model, folder, names=names)
        else:
            model = from_torch(_loaded(torch, kind, config, folder), example, parts=parts)
    model.configurations = {
        name: (folder / name).read_bytes() for name in CONFIGURATIONS if is_file(folder / name)
    }
    return model


def _transformers() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "a model in Hugging Face's form needs transformers",
            got=str(error),
            hint="pip install transformers",
        ) from None


def _class_of(transformers: Any, folder: Path) -> tuple[Any, Any]:
    """The class that a configuration names, and the configuration."""
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise ModelImportError(
            "transformers does not know a configuration",
            got=f"{folder / CONFIGURATIONS[0]}: {' '.join(str(error).split())[:400]}",
        ) from None
    if hasattr(config, "_experts_implementation"):
        # The default chooses rows by the values of tensors.
        config._experts_implementation = "batched_mm"  # noqa: SLF001  # as its keyword does
    names = getattr(config, "architectures", None) or []
    kind = getattr(transformers, str(names[0]), None) if names else None
    if not inspect.isclass(kind) or not issubclass(kind, transformers.PreTrainedModel):
        raise ModelImportError(
            "a configuration names no class of transformers",
            got=f"architectures {names} in {folder / CONFIGURATIONS[0]}",
            expected="such as ['LlamaForCausalLM']",
        )
    return kind, config


def _example(torch: Any, kind: Any, config: Any, batch: int, length: int) -> dict[str, Any]:
    """Arguments of a model: what its class says is its main input, and labels."""
    parameters = inspect.signature(kind.forward).parameters
    name = kind.main_input_name
    if name == "input_ids":
        example = {name: torch.zeros((batch, length), dtype=torch.long)}
    elif name == "pixel_values":
        size = getattr(config, "image_size", None) or 224
        sizes = size if isinstance(size, (list, tuple)) else (size, size)
        example = {name: torch.zeros((batch, getattr(config, "num_channels", 3), *sizes))}
    else:
        raise ModelImportError(
            f"{kind.__name__} takes other inputs than tokens or images",
            got=name,
            hint="write a file whose make() returns the model and an example of its arguments",
        )
    if "labels" in parameters:
        shape = (batch,) if kind.__name__.endswith(_LABELS_OF_CLASSES) else (batch, length)
        example["labels"] = torch.zeros(shape, dtype=torch.long)
    if "use_cache" in parameters:
        example["use_cache"] = False
    return example


def _loaded(torch: Any, kind: Any, config: Any, folder: Path) -> Any:
    """The module with its weights in memory: some classes join what their files hold apart, such as
    the matrices of experts, or give it other names.
    """
    try:
        module, told = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            dtype=torch.float32,
        )
    except Exception as error:
        told = {type(error).__name__: [str(error)]}
    problems = {what: sorted(map(str, entries)) for what, entries in told.items() if entries}
    if problems:
        raise DataError(
            f"the weights do not fit {kind.__name__}",
            got=f"{folder}: " + "; ".join(f"{k}: {', '.join(v[:8])}" for k, v in problems.items()),
        )
    return module.eval()


def _names_in(module: Any, model: ImportedModel) -> Callable[[str], str | None]:
    """What an entry of the files is called in the model: as transformers, with and without the
    prefix of the base model, and without what the class says to ignore.
    """
    known = dict(model.named_parameters(remove_duplicate=False))
    ignored = [
        re.compile(each)
        for each in getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    ]
    prefix = f"{module.base_model_prefix}."

    def name_of(entry: str) -> str | None:
        for name in (entry, prefix + entry, entry.removeprefix(prefix)):
            if name in known:
                return name
        return None if any(pattern.search(entry) for pattern in ignored) else entry

    return name_of
