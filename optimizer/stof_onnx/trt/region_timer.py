"""Times regions and the pieces they compete with on the GPU, by replays of CUDA graphs of several runs.

A piece is built by TensorRT as it would build it in the engine: the same precision, tensors [rows, width], the
neighbours that it would merge with included (fusion/search/cost.py cuts pieces so). A GEMM region is run through the C
API where the kernel library is built, else as a small engine with one plugin node; a compiled program is launched
directly. Inputs and weights are random numbers on both sides, and stay in the second-level cache as far as they fit, on
both sides alike.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof_onnx.errors import StofError
from stof_onnx.fusion.functions import NORM_ATTRIBUTES, PREFIX
from stof_onnx.fusion.piece_model import piece_model, random_array
from stof_onnx.fusion.search import Measurement, Region
from stof_onnx.fusion.search.roofline import program_of
from stof_onnx.fusion.segment import Segment
from stof_onnx.fusion.templates import GEMM_TEMPLATES, Instance
from stof_onnx.kernels import gemm
from stof_onnx.kernels.capi import DEFAULT_LIBRARY, DType
from stof_onnx.kernels.cubin_run import LoadedProgram
from stof_onnx.kernels.fused_capi import CUBLASLT_CONFIG, Activation, FusedLibrary, FusedParams, Norm, Template
from stof_onnx.kernels.gemm_pair import GemmPair
from stof_onnx.kernels.triton_rows import compile_program, compile_programs, parse_config, ranked
from stof_onnx.options import EngineWishes
from stof_onnx.trt import availability, cuda, turns
from stof_onnx.trt.build import BuildOptions, build_engine, tactic_sources
from stof_onnx.trt.graph_timing import median_us, random_buffers
from stof_onnx.trt.manifest import digest
from stof_onnx.trt.region_nodes import PLUGIN_NAMESPACE, PLUGIN_VERSION
from stof_onnx.trt.session import EngineSession

_log = logging.getLogger(__name__)
_OPSET = 17
_DTYPES = {"fp16": DType.F16, "bf16": DType.BF16}  # that GEMM kernels take


def gpu_timer(wishes: EngineWishes) -> GpuTimer:
    """The timer for engines as `wishes` describes them.

    Raises:
        StofError: TensorRT, a GPU or the plugin library is missing.
    """
    from stof_onnx.trt.engine_step import find_plugin_library

    options = BuildOptions(
        precision=wishes.precision,
        plugins=find_plugin_library(),
        embed=False,
        workspace=wishes.workspace,
        timing_cache=wishes.timing_cache,
        level=wishes.level,
    )
    library = FusedLibrary(DEFAULT_LIBRARY) if Path(DEFAULT_LIBRARY).is_file() else None
    return GpuTimer(options, availability.device().arch, library)


@dataclass
class GpuTimer:
    """A `Timer` for the first GPU.

    Attributes:
        options: of engines; without a profile, since pieces have fixed sizes.
        arch: compute capability times ten.
        library: the kernels through the C API; None times them through TensorRT.
        programs: configurations of a compiled program that are tried, the most promising ones; None for all.
    """

    options: BuildOptions
    arch: int
    library: FusedLibrary | None = None
    programs: int | None = 4

    @property
    def name(self) -> str:
        plugins = digest(self.options.plugins)[:12] if self.options.plugins else ""
        version = availability.tensorrt().__version__
        return f"{cuda.name()}; TensorRT {version}, {tactic_sources()}; {self.options.precision}; plugins {plugins}"

    def configs(self, region: Region) -> Sequence[str]:
        instance = region.instance
        dtype = self._dtype(region)
        if not instance.rows or (self.options.precision == "bf16" and instance.dtype == "fp32"):
            return ()
        if instance.template in GEMM_TEMPLATES:
            return self._gemm_configs(instance) if dtype in _DTYPES else ()
        try:
            program = program_of(region, self.options.precision)
            found = ranked(program, instance.rows, gemm.H200)[: self.programs]
            compile_programs([(program, config, 2) for config in found], (self.arch,))
        except StofError as error:
            _log.info("no kernel for %s: %s", instance.template, error)
            return ()
        return [config.name for config in found]

    def _gemm_configs(self, instance: Instance) -> list[str]:
        """Compiled variants by promise, and cuBLASLt where the engine will find it as this process does."""
        sizes = instance.rows, instance.width, instance.depth
        compiled = gemm.ranked(instance.kernel, *sizes, activation=instance.activation) if self.arch == 90 else []
        if instance.kernel != "gemm_epilogue" or self.arch < 80 or self.library is None:
            return compiled
        activation, residual = (instance.attributes.get(key) for key in ("activation", "has_residual"))
        lacks = gemm.cublaslt_lacks(str(activation or "none"), bool(residual)) or self.library.cublaslt_problem()
        return compiled if lacks else [*compiled, gemm.CUBLASLT]

    def fused(self, region: Region, config: str) -> Measurement:
        start = time.monotonic()
        try:
            if region.instance.template not in GEMM_TEMPLATES:
                us, built = self._program_us(region, config)
            elif self.library is not None:
                us, built = self._library_us(self.library, region, config), 0.0
            else:
                us, built = self._engine_us(_plugin_model(region, config, self._dtype(region)))
        except StofError as error:
            return Measurement(math.inf, time.monotonic() - start, problem=str(error))
        return Measurement(us, time.monotonic() - start, built)

    def left(self, piece: Segment) -> Measurement:
        start = time.monotonic()
        try:
            us, built = self._engine_us(piece_model(piece))
        except StofError as error:
            return Measurement(math.inf, time.monotonic() - start, problem=str(error))
        return Measurement(us, time.monotonic() - start, built)

    def _dtype(self, region: Region) -> str:
        return self.options.precision if region.instance.dtype == "fp32" else region.instance.dtype

    def build(self, model: onnx.ModelProto) -> bytes:
        """The engine of a piece, or of a region as one plugin node.

        Raises:
            StofError: TensorRT builds none.
        """
        with tempfile.TemporaryDirectory() as folder, turns.building():
            path = Path(folder) / "piece.onnx"
            onnx.save(model, str(path))
            plugins = self.options.plugins if _has_plugin(model) else None
            options = replace(self.options, plugins=plugins, half_io=self.options.precision == "fp16")
            return build_engine(path, options).data

    def _engine_us(self, model: onnx.ModelProto) -> tuple[float, float]:
        """Microseconds of the model as an engine, and the seconds that building took."""
        start = time.monotonic()
        data = self.build(model)
        built = time.monotonic() - start
        return engine_us(data), built

    def _program_us(self, region: Region, config: str) -> tuple[float, float]:
        """Microseconds of a compiled program, and the seconds that compiling took."""
        start = time.monotonic()
        program = program_of(region, self.options.precision)
        compiled = compile_program(program, parse_config(program, config), (self.arch,), 2)
        built = time.monotonic() - start
        instance, dtype = region.instance, self._dtype(region)
        full = instance.rows, instance.width
        shapes: list[tuple[int, ...]] = [
            (instance.width,) if name in instance.vectors else full for name in instance.inputs
        ]
        scales: list[float] = []
        if isinstance(program, GemmPair):
            shapes = list(program.shapes(instance.rows).values())
            scales = [shape[0] ** -0.5 if i in (1, 2) else 1.0 for i, shape in enumerate(shapes)]
        loaded = LoadedProgram(compiled)
        made = random_buffers([full] * len(instance.outputs), dtype)
        with random_buffers(shapes, dtype, scales) as inputs, made as outputs:
            stream = cuda.call("cudaStreamCreate")
            try:
                with turns.alone():
                    us = median_us(lambda: loaded.launch(inputs, outputs, shapes, 0, int(stream)), stream)
            finally:
                cuda.call("cudaStreamDestroy", stream)
        return us, built

    def _library_us(self, library: FusedLibrary, region: Region, config: str) -> float:
        instance, dtype = region.instance, self._dtype(region)
        template = Template[instance.kernel.upper()]
        names = {c.name: i for i, c in enumerate(library.configs(template))} | {gemm.CUBLASLT: CUBLASLT_CONFIG}
        if config not in names:
            raise StofError(f"the kernel library has no variant {config}", instance.template, "Rebuild it: make cuda")
        m, n, k = instance.rows, instance.width, instance.depth
        second = template is Template.GATED_MLP
        bias = bool(instance.attributes["has_bias"])
        residual, scale, shift, keep_sum = (
            bool(instance.attributes.get(name, 0)) for name in ("has_residual", "has_scale", "has_shift", "keep_sum")
        )
        wanted = {
            "a": (m, k),
            "b": (k, n),
            "b2": (k, n) if second else None,
            "bias": (n,) if bias else None,
            "bias2": (n,) if bias and second else None,
            "residual": (m, n) if residual else None,
            "scale": (n,) if scale else None,
            "shift": (n,) if shift else None,
            "sum": (m, n) if keep_sum else None,
            "out": (m, n),
        }
        shapes = {name: shape for name, shape in wanted.items() if shape is not None}
        scales = [k**-0.5 if name in ("b", "b2") else 1.0 for name in shapes]  # products stay in range
        with random_buffers(list(shapes.values()), dtype, scales) as pointers:
            p = FusedParams()
            p.template_id, p.config, p.dtype = int(template), names[config], _DTYPES[dtype]
            p.activation = int(Activation[str(instance.attributes.get("activation", "none")).upper()])
            p.m, p.n, p.k = m, n, k
            for name, pointer in zip(shapes, pointers, strict=True):
                setattr(p, name, pointer)
            p.stride_a, p.stride_b, p.stride_b2, p.stride_residual, p.stride_out, p.stride_sum = k, n, n, n, n, n
            if template is Template.GEMM_NORM:
                p.norm = Norm.RMS if instance.attributes["kind"] == "rms_norm" else Norm.LAYER
                p.epsilon = float(instance.attributes["epsilon"])
            workspace = cuda.Buffer(library.workspace_bytes(p))
            p.workspace, p.workspace_bytes = workspace.pointer, workspace.nbytes
            stream = cuda.call("cudaStreamCreate")
            try:
                with turns.alone():
                    return median_us(lambda: library.launch(p, int(stream)), stream)
            finally:
                cuda.call("cudaStreamDestroy", stream)
                workspace.free()


def engine_us(data: bytes) -> float:
    """Microseconds of one run of an engine, whose plugins are loaded, on random inputs.

    Raises:
        StofError: it does not load or run.
    """
    session = EngineSession(data)
    try:
        rng = np.random.default_rng(0)
        feeds = {}
        for name, shape in session.opt_shapes().items():
            dtype = session.dtype(name)
            feeds[name] = random_array(shape, dtype, rng) if dtype.kind == "f" else np.zeros(shape, dtype)
        session.bind(feeds)
        with turns.alone():
            return median_us(session.execute, session.stream)
    finally:
        session.close()


def _has_plugin(model: onnx.ModelProto) -> bool:
    return any(node.op_type == PREFIX for node in model.graph.node)


def _plugin_model(region: Region, config: str, dtype: str) -> onnx.ModelProto:
    """A GEMM region as a model of one plugin node with random weights, in fp16."""
    instance, rng = region.instance, np.random.default_rng(0)
    if dtype != "fp16":
        raise StofError("without the kernel library only fp16 regions are timed", "fusion", "Build it: make cuda")
    m, n, k = instance.rows, instance.width, instance.depth
    gemms = 2 if instance.template == "gated_mlp" else 1
    names = ["x", "w0", "w1"][: 1 + gemms]
    biases = [f"bias{i}" for i in range(gemms if instance.attributes["has_bias"] else 0)]
    residual = ["residual"] if instance.attributes.get("has_residual") else []
    vectors = [name for name in ("scale", "shift") if instance.attributes.get(f"has_{name}")]
    outputs = ["y", "sum"] if instance.attributes.get("keep_sum") else ["y"]
    initializers = [
        numpy_helper.from_array((random_array((k, n), np.float32, rng) / np.float32(np.sqrt(k))).astype(np.float16), w)
        for w in names[1:]
    ] + [numpy_helper.from_array(random_array((n,), np.float16, rng), name) for name in biases + vectors]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [m, k])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [m, n]) for name in residual]
    wanted = NORM_ATTRIBUTES if instance.template == "gemm_norm" else ("activation", "has_bias", "has_residual")
    attributes: dict[str, object] = {n: instance.attributes[n] for n in wanted if n in instance.attributes}
    attributes |= {"template": instance.kernel, "config": config}
    attributes |= {"plugin_version": PLUGIN_VERSION, "plugin_namespace": PLUGIN_NAMESPACE}
    node = helper.make_node(PREFIX, [*names, *biases, *residual, *vectors], outputs, "region", domain="stof")
    node.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [m, n]) for name in outputs]
    graph = helper.make_graph([node], "region", inputs, made, initializers)
    imports = [helper.make_opsetid("", _OPSET), helper.make_opsetid("stof", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)
