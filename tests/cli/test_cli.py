"""Exit codes, one clear message, nothing half-written, and the input never touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_onnx import __version__, cli

from benchmarks.encoder import EncoderSpec, build_encoder
from tests.graph.builders import linear, save_external
from tests.verify.models import attention

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    onnx.save(linear(), str(path))
    return path


def _refused(arguments: list[str], message: str, folder: Path, capsys: Captured, code: int = 2) -> None:
    """The command fails with one line that holds `message`, and `folder` is as it was."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert cli.main(arguments) == code
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and message in lines[0] and lines[0].startswith("stof-onnx: "), printed.err
    assert "Traceback" not in printed.out + printed.err
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello world, this is text" * 9, "ONNX model"),
        (linear().SerializeToString()[:333], "ONNX model"),
        (None, "no such file"),
    ],
)
@pytest.mark.parametrize("command", ["optimize", "inspect"])
def test_bad_files(content: bytes | None, message: str, command: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "m.onnx"
    if content is not None:
        path.write_bytes(content)
    _refused([command, str(path)], message, tmp_path, capsys)


def test_missing_and_escaping_external_data(tmp_path: Path, capsys: Captured) -> None:
    save_external(linear(), tmp_path / "m.onnx")
    proto = onnx.load(str(tmp_path / "m.onnx"), load_external_data=False)
    (tmp_path / "weights.bin").unlink()
    _refused(["optimize", str(tmp_path / "m.onnx")], "weights.bin is missing", tmp_path, capsys)
    for tensor in proto.graph.initializer:
        tensor.external_data[0].value = "../../etc/passwd"
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    _refused(["optimize", str(tmp_path / "m.onnx")], "leaves the model's folder", tmp_path, capsys)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("nope:1x8", "no input 'nope'"),
        ("x:1x9", "axis 1 has size 8"),
        ("x:0x8", "size 0"),
        ("x:1x8x1", "has 2 axes"),
        ("x", "no shape found"),
        ("x:4x8:1x8", "min <= opt <= max"),
    ],
)
def test_bad_shapes(shape: str, message: str, model: Path, capsys: Captured) -> None:
    _refused(["optimize", str(model), "--shape", shape], message, model.parent, capsys)


def test_bad_targets(model: Path, capsys: Captured) -> None:
    folder = model.parent
    (folder / "sub").mkdir()
    (folder / "link.onnx").symlink_to(model)
    os.link(model, folder / "hard.onnx")
    os.mkfifo(folder / "pipe")
    for target, message in [
        (model, "the output is the input file"),
        (folder / "link.onnx", "the output is the input file"),
        (folder / "hard.onnx", "the output is the input file"),
        (folder / "sub", "the output is a folder"),
        (folder / "none" / "o.onnx", "does not exist"),
        (model / "o.onnx", "does not exist"),
        (Path("/proc/o.onnx"), "/proc"),
        (folder / "pipe", "the output is a device or a pipe"),
    ]:
        _refused(["optimize", str(model), "-o", str(target)], message, folder, capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(model: Path, capsys: Captured) -> None:
    (model.parent / "locked").mkdir(mode=0o555)
    _refused(["optimize", str(model), "-o", str(model.parent / "locked" / "o")], "read-only", model.parent, capsys)


def test_the_report_can_not_replace_a_model(model: Path, capsys: Captured) -> None:
    _refused(["optimize", str(model), "--report", str(model)], "the report is the input file", model.parent, capsys)
    output = model.with_name("o.onnx")
    arguments = ["optimize", str(model), "-o", str(output), "--report", str(output)]
    _refused(arguments, "the report is the output file", model.parent, capsys)
    _refused(
        ["inspect", str(model), "--report", str(model.parent / "no" / "r")], "does not exist", model.parent, capsys
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--atol", "--rtol"])
def test_a_tolerance_is_a_finite_number(option: str, value: str, model: Path, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["verify", str(model), str(model), f"{option}={value}"])
    assert stop.value.code == 2 and "finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "what"),
    [("--emit-lowered", "lowered model"), ("--timing-cache", "timing cache"), ("--report", "report")],
)
def test_no_other_file_replaces_a_model(option: str, what: str, model: Path, capsys: Captured) -> None:
    folder = model.parent
    (folder / "link").symlink_to(model)
    os.mkfifo(folder / "pipe")
    for target, message in [
        (model, "is the input file"),
        (folder / "link", "is the input file"),
        (folder / "o.onnx", "is the output file"),
        (folder, "is a folder"),
        (folder / "pipe", "is a device or a pipe"),
        (folder / "no" / "file", "does not exist"),
    ]:
        arguments = ["optimize", str(model), "-o", str(folder / "o.onnx"), option, str(target)]
        _refused(arguments, message, folder, capsys)
    if option != "--report":
        arguments = ["optimize", str(model), option, str(folder / "x"), "--report", str(folder / "x")]
        _refused(arguments, f"the report is the {what} file", folder, capsys)


OPTIONS = ["--report", "--emit-lowered", "--timing-cache", "--engine"]


@pytest.mark.parametrize("option", OPTIONS)
def test_no_file_of_a_run_replaces_the_weights(
    option: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stof_onnx.pipeline.why_no_engine", lambda: "")
    model, data = tmp_path / "m.onnx", tmp_path / "weights.bin"
    save_external(linear(), model)
    (tmp_path / "link").symlink_to(data)
    for target in (data, tmp_path / "link"):
        command = ["optimize", str(model), "-o", str(tmp_path / "o.onnx"), option, str(target)]
        _refused(command, "is a data file of the input", tmp_path, capsys)
    if option == "--report":
        for command in (["inspect", str(model)], ["verify", str(model), str(model)]):
            _refused([*command, option, str(data)], "the report is a data file of the input", tmp_path, capsys)


def test_derived_files_collide_with_none(model: Path, capsys: Captured) -> None:
    """The engine's manifest, and the files that weights go to."""
    folder = model.parent
    for option, name, other in (
        ("--engine", "x.engine", "x.json"),
        ("--emit-lowered", "x.onnx", "x.onnx.data"),
        ("-o", "x.onnx", "x.onnx.data"),
    ):
        command = ["optimize", str(model), option, str(folder / name), "--report", str(folder / other)]
        _refused(command, "the report is the ", folder, capsys)
    command = ["optimize", str(model), "--engine", str(folder / "m.x"), "-o", str(folder / "m.json")]
    _refused(command, "the engine's manifest is the output file", folder, capsys)
    (folder / "in.json").write_text("[]")
    command = ["verify", str(model), str(model), "--load-inputs", str(folder / "in.json")]
    _refused([*command, "--report", str(folder / "in.json")], "is the loaded inputs file", folder, capsys)


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_is_not_read(kind: str, model: Path, capsys: Captured) -> None:
    """In particular nothing waits for the other end of a pipe."""
    folder = model.parent
    source = {"folder": folder / "sub.onnx", "pipe": folder / "pipe.onnx", "device": Path("/dev/zero")}[kind]
    (folder / "sub.onnx").mkdir()
    os.mkfifo(folder / "pipe.onnx")
    message = f"{source}: is a {'folder' if kind == 'folder' else 'device or a pipe'}"
    for command in (
        ["optimize", str(source), "-o", str(folder / "o.onnx")],
        ["inspect", str(source)],
        ["verify", str(source), str(model)],
        ["verify", str(model), str(source)],
        ["verify", str(model), str(model), "--load-inputs", str(source)],
        ["bench", str(source)],
    ):
        _refused(command, message, folder, capsys)


def test_a_model_on_a_pipe_of_standard_input_is_refused(model: Path) -> None:
    command = [sys.executable, "-m", "stof_onnx.cli", "inspect", "/dev/stdin"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, input=model.read_bytes(), capture_output=True, timeout=60, env=environment)
    assert done.returncode == 2 and b"/dev/stdin: is a device or a pipe" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--shape", "x:1x12345678901234567890", "at most 999999999"),
        ("--shape", "x:" + "9" * 5000, "at most 999999999"),
        ("--seed", "-1", "at least 0"),
        ("--seed", "9" * 5000, "not a whole number"),
        ("--seed", "x", "not a whole number: x"),
        ("--samples", "0", "at least 1"),
        ("--samples", "100000000", "at most 1000"),
        ("--samples", "1.5", "not a whole number: 1.5"),
        ("--memory-limit", "infG", "not a size: infG"),
        ("--memory-limit", "nan", "not a size: nan"),
        ("--memory-limit", "-4G", "not a size: -4G"),
        ("--memory-limit", "0", "not a size: 0"),
        ("--memory-limit", "1e300", "not a size"),
        ("--memory-limit", "G", "not a size: G"),
        ("--workspace", "1e30T", "not a size"),
        ("--arch", "-90", "not an architecture: -90"),
        ("--arch", "9.0", "Write compute capability 9.0 as 90"),
        ("--arch", "75", "the oldest is 80"),
        ("--arch", "9" * 5000, "not an architecture"),
        ("--engine", "model.onnx", "Write the model before --engine"),
        ("--builder-level", "7", "invalid choice"),
        ("--atol", "x", "finite number"),
    ],
)
def test_bad_numbers_are_one_message(option: str, value: str, message: str, model: Path, capsys: Captured) -> None:
    try:
        code = cli.main(["optimize", str(model), f"{option}={value}"])
    except SystemExit as stop:
        code = int(str(stop.code))
    printed = capsys.readouterr().err
    assert code == 2 and message in printed.splitlines()[-1]
    assert "internal" not in printed and "Traceback" not in printed and "_" not in printed.splitlines()[-1]


def test_a_bias_that_is_no_mask_says_so(tmp_path: Path, capsys: Captured) -> None:
    spec, allowed = EncoderSpec(1, 32, 4, 1, 64), np.tri(64, dtype=bool)
    for low, said in ((-100.0, True), (-1e4, False)):
        proto = build_encoder(spec, allowed)
        mask = next(t for t in proto.graph.initializer if t.name == "mask")
        mask.CopyFrom(onnx.numpy_helper.from_array(np.where(allowed, 0, low).astype(np.float32)[None, None], "mask"))
        onnx.save(proto, str(tmp_path / "m.onnx"))
        assert cli.main(["inspect", str(tmp_path / "m.onnx")]) == 0
        printed = capsys.readouterr().out
        assert ("the value -100 added to scores is a bias, not a mask" in printed) == said
        assert ("mask none" in printed) == said


def test_nothing_to_replace(model: Path, capsys: Captured) -> None:
    assert cli.main(["optimize", str(model), "--report", str(model.parent / "r.json")]) == 0
    assert "nothing to replace" in capsys.readouterr().out
    assert onnx.load(str(model.with_name("m.stof.onnx"))) == linear()
    report = json.loads((model.parent / "r.json").read_text())
    assert report["attention"] == {"found": 0, "replaced": 0, "refused": [], "sites": []}
    assert report["verify"] is None and "stof-onnx" in report["versions"] and "load" in report["timings"]


def test_what_an_earlier_run_replaced_is_told(tmp_path: Path, capsys: Captured) -> None:
    once, twice = tmp_path / "m.stof.onnx", tmp_path / "again.onnx"
    onnx.save(attention(), str(tmp_path / "m.onnx"))
    shape = ["--shape", "ids:2x40"]
    assert cli.main(["optimize", str(tmp_path / "m.onnx"), "--no-verify", "--no-engine", *shape]) == 0
    assert "1 of 1 attention replaced" in capsys.readouterr().out
    assert cli.main(["optimize", str(once), "-o", str(twice), "--no-engine"]) == 0
    assert "1 attention replaced by an earlier run, no other one, nothing to replace" in capsys.readouterr().out
    assert once.read_bytes() == twice.read_bytes()


def test_a_file_that_onnx_runtime_optimized(tmp_path: Path, capsys: Captured) -> None:
    """It has no shapes inside, and products whose shapes ONNX does not infer."""
    onnx.save(attention(padding=False), str(tmp_path / "m.onnx"))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "ort.onnx")
    ort.InferenceSession(str(tmp_path / "m.onnx"), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(str(tmp_path / "ort.onnx"))
    assert "FusedMatMul" in {n.op_type for n in saved.graph.node} and not saved.graph.value_info
    assert cli.main(["optimize", str(tmp_path / "ort.onnx"), "--no-engine", "--shape", "ids:2x40"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 attention replaced" in printed and ": passed" in printed


def test_verify_tells_a_model_that_does_not_run(tmp_path: Path, capsys: Captured) -> None:
    onnx.save(attention(padding=False), str(tmp_path / "a.onnx"))
    fixed = attention(padding=False)
    fixed.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 16
    onnx.save(fixed, str(tmp_path / "b.onnx"))
    assert cli.main(["verify", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), "--shape", "ids:2x40"]) == 1
    printed = capsys.readouterr().out
    assert "b.onnx does NOT run like" in printed and "index: 1 Got: 40 Expected: 16" in printed


def test_verify_does_not_run_a_lowered_model(tmp_path: Path, capsys: Captured) -> None:
    model, lowered = tmp_path / "a.onnx", tmp_path / "lowered.onnx"
    onnx.save(attention(padding=False), str(model))
    command = ["optimize", str(model), "--no-verify", "--no-engine", "--shape", "ids:2x40"]
    assert cli.main([*command, "--emit-lowered", str(lowered)]) == 0
    assert "lowered to plugin nodes: 1 of 1 attention\n" in capsys.readouterr().out
    assert cli.main(["verify", str(model), str(lowered), "--shape", "ids:2x40"]) == 2
    assert "holds TensorRT plugin nodes, which ONNX Runtime does not run" in capsys.readouterr().err


def test_verify_tells_equal_from_different(tmp_path: Path, capsys: Captured) -> None:
    onnx.save(attention(), str(tmp_path / "a.onnx"))
    onnx.save(attention(flaw="mask"), str(tmp_path / "b.onnx"))
    shape = ["--shape", "ids:2x40"]
    assert cli.main(["verify", str(tmp_path / "a.onnx"), str(tmp_path / "a.onnx"), *shape]) == 0
    assert "computes the same as" in capsys.readouterr().out
    report = tmp_path / "r.json"
    code = cli.main(["verify", str(tmp_path / "a.onnx"), str(tmp_path / "b.onnx"), *shape, "--report", str(report)])
    assert code == 1 and "does NOT compute the same" in capsys.readouterr().out
    verdict = json.loads(report.read_text())["verify"]
    assert verdict["passed"] is False and verdict["outputs"][0]["max_abs"] > 0 and verdict["failures"]


def test_version_and_help(capsys: Captured) -> None:
    for arguments, expected in [
        (["--version"], __version__),
        (["--help"], "optimize"),
        (["optimize", "--help"], "--no-verify"),
        (["inspect", "--help"], "--pictures"),
        (["verify", "--help"], "--load-inputs"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 0 and expected in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        cli.main(["optimise", "m.onnx"])
    assert stopped.value.code == 2


def test_export_without_torch_names_the_extra(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [n for n in sys.modules if n.startswith("stof_models")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["export", "bert", "-o", "never.onnx"]) == 2
    assert "needs torch" in (message := capsys.readouterr().err) and "stof-onnx[models]" in message


def test_unexpected_errors_are_one_line_unless_asked(
    model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("stof_onnx.pipeline.load_model", broken)
    _refused(["inspect", str(model)], "internal error: ZeroDivisionError: oops", model.parent, capsys)
    monkeypatch.setenv("STOF_DEBUG", "1")
    assert cli.main(["inspect", str(model)]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_run_leaves_nothing(model: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stof_onnx.graph.save.write_model", interrupt)
    _refused(["optimize", str(model)], "interrupted", model.parent, capsys, code=130)


def test_the_comparison_does_not_import_torch(tmp_path: Path) -> None:
    """polygraphy looks for torch, and swallows an interrupt that arrives meanwhile."""
    onnx.save(attention(), str(tmp_path / "m.onnx"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("open(__path__[0] + '/imported', 'w')\n__version__ = '2.9.0'\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "stof_onnx.cli", "verify", str(tmp_path / "m.onnx"), str(tmp_path / "m.onnx")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "passed" in done.stdout
    assert not (tmp_path / "torch" / "imported").exists()


def test_a_terminated_run_leaves_nothing(model: Path) -> None:
    """SIGTERM while the staged file is being compared."""
    program = (
        "import os, signal, sys; from stof_onnx import cli, pipeline\n"
        "stage = pipeline.stage_model\n"
        "def staged(*arguments):\n"
        "    result = stage(*arguments)\n"
        "    result.__class__.commit = lambda self: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return result\n"
        "pipeline.stage_model = staged\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "optimize", str(model)],
        check=False,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 143 and os.listdir(model.parent) == [model.name]
    assert done.stderr.strip() == b"stof-onnx: terminated"


def test_as_a_program(model: Path) -> None:
    """Through the installed entry point's module: plain text when it is no terminal."""
    done = subprocess.run(
        [sys.executable, "-m", "stof_onnx.cli", "optimize", str(model)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr and done.stderr == ""
    assert f"written: {model.with_name('m.stof.onnx')}" in done.stdout


def test_a_terminal_of_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "modèle.onnx"
    onnx.save(build_encoder(EncoderSpec(3, 16, 2, 1, 16), np.tri(16, dtype=bool)), str(path))
    command = [sys.executable, "-m", "stof_onnx.cli", "optimize", str(path), "--no-engine"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"3 of 3 attentions replaced" in done.stdout and b"?" in done.stdout


def test_a_region_that_is_not_faster_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "cache"))
    source, report = str(tmp_path / "m.onnx"), tmp_path / "report.json"
    onnx.save(build_encoder(EncoderSpec(2, 64, 4, 2, 64), np.tril(np.ones((64, 64), bool))), source)
    options = ["--no-engine", "--no-verify", "--tune-budget", "60s", "--report", str(report)]
    assert cli.main(["optimize", source, *options]) == 0
    blocks = json.loads(report.read_text())["fusion"]["plan"]["blocks"]
    regions = [region for block in blocks for region in block["regions"]]
    timed = [r for r in regions if r["left_us"] is not None]
    assert any(not r["kept"] for r in regions), "the estimates of this model have such a region"
    assert all(r["kept"] or r["fused_us"] >= r["left_us"] - 0.3 for r in timed)
    assert all(r["reason"].startswith("faster") and r["fused_us"] < r["left_us"] for r in regions if r["kept"])
