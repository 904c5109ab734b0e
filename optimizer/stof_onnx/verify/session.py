"""ONNX Runtime sessions behind polygraphy's runner; extra tensors can be made outputs, external data stays in place."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.logger import G_LOGGER

from stof_onnx.errors import StofError
from stof_onnx.graph.external import is_external, read_tensor, tensor_nbytes
from stof_onnx.verify.definition import spell_out_attention
from stof_onnx.verify.rounding import is_half, round_each_step

_QUIET = 4  # ONNX Runtime logs nothing: errors arrive as exceptions
_INLINE_BELOW = 4096  # bytes; ONNX Runtime's shape inference can not read axes and shapes from external data
_EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


class _NumpyRunner(OnnxrtRunner):
    """polygraphy's runner without its look for PyTorch tensors, which imports torch where that is installed: more than
    a second, and an interrupt in the middle of it is swallowed and leaves a torch that crashes the process."""

    def infer_impl(self, feed_dict: dict[str, np.ndarray]) -> OrderedDict[str, np.ndarray]:
        start = time.monotonic()
        outputs = self.sess.run(None, feed_dict)
        self.inference_time = time.monotonic() - start
        return OrderedDict(zip((o.name for o in self.sess.get_outputs()), outputs, strict=True))


class Runner:
    """Runs one model on ONNX Runtime's CPU provider.

    Only semantics-preserving ("basic") graph optimizations are on: a runtime's own attention fusions are not what is
    being compared, and ONNX Attention runs by its definition. Half-precision models round after every operator (see
    `rounding`).
    """

    def __init__(self, proto: onnx.ModelProto, base_dir: Path, extra_outputs: Iterable[str] = ()) -> None:
        """Loads `proto` (external data relative to `base_dir`) with further tensors of its main graph as outputs.

        Raises:
            StofError: ONNX Runtime refuses the model.
        """
        model = onnx.ModelProto()
        model.CopyFrom(proto)
        present = {o.name for o in model.graph.output}
        for name in dict.fromkeys(extra_outputs):
            if name not in present:
                model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
        for tensor in model.graph.initializer:
            if is_external(tensor) and tensor_nbytes(tensor) < _INLINE_BELOW:
                tensor.CopyFrom(onnx.numpy_helper.from_array(read_tensor(tensor, base_dir), tensor.name))
        spell_out_attention(model)
        half = is_half(model)
        if half:
            round_each_step(model)
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        levels = ort.GraphOptimizationLevel
        options.graph_optimization_level = levels.ORT_DISABLE_ALL if half else levels.ORT_ENABLE_BASIC
        options.add_session_config_entry(_EXTERNAL_FOLDER, str(base_dir.resolve()))
        data = model.SerializeToString()
        del model
        try:
            session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises one pybind class for each status
            raise StofError(f"ONNX Runtime refuses the model ({first_line(error)})") from error
        self.input_names = [i.name for i in session.get_inputs()]
        self.output_names = [o.name for o in session.get_outputs()]
        self._runner = _NumpyRunner(session)

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name (extra outputs included).

        Raises:
            StofError: the run failed.
        """
        try:
            with G_LOGGER.verbosity(G_LOGGER.CRITICAL), self._runner:
                outputs = self._runner.infer({n: feeds[n] for n in self.input_names}, check_inputs=False)
        except Exception as error:
            raise StofError(f"ONNX Runtime can not run the model ({first_line(error)})") from error
        return {name: np.array(value) for name, value in outputs.items()}


def first_line(error: Exception) -> str:
    """The first line of an exception's text with the indices that ONNX Runtime lists below it, or its type."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    indices = takewhile(lambda line: line.startswith("index:"), (line.strip() for line in lines[1:]))
    return " ".join([lines[0], *indices])
