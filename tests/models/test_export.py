"""Exported files: they run, carry their description, and a failed export leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from stof_models import cli
from stof_models.errors import ExportError
from stof_models.export import export_model
from stof_models.families import FAMILIES
from stof_models.info import ExportInfo, info_path
from stof_models.options import ExportOptions


def test_command_line_knows_every_architecture() -> None:
    assert sorted(cli._ARCHITECTURES) == sorted(FAMILIES)


@pytest.mark.parametrize(("exporter", "opset"), [("torchscript", 17), ("dynamo", 18), ("dynamo", 23)])
def test_exported_model_runs(exporter: str, opset: int, tmp_path: Path) -> None:
    options = ExportOptions(
        "bert", mask="window", exporter=exporter, opset=opset, padding=True, dynamic="sequence", layers=1
    )
    path = tmp_path / "bert.onnx"
    info = export_model(options, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bert.json", "bert.onnx"]
    model = onnx.load(str(path))
    assert next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")) == opset
    assert [i.name for i in model.graph.input] == ["input_ids", "attention_mask"]
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for dims in ({}, {"batch": 3, "sequence": 101}):
        feed = info.random_inputs(np.random.default_rng(0), dims)
        (output,) = session.run(None, feed)
        assert output.shape == (*feed["input_ids"].shape, options.hidden)
        assert np.isfinite(output).all()
    loaded = ExportInfo.load(info_path(path))
    assert loaded.sites == info.sites
    assert loaded.inputs == info.inputs
    assert loaded.dims == info.dims


def test_random_inputs_are_valid(tmp_path: Path) -> None:
    info = export_model(ExportOptions("t5-decoder", padding=True, layers=1), tmp_path / "t5.onnx")
    rng = np.random.default_rng(5)
    for _ in range(50):
        feed = info.random_inputs(rng)
        assert feed["input_ids"].min() >= 0
        assert feed["input_ids"].max() < 128
        for name in ("attention_mask", "encoder_attention_mask"):
            assert set(np.unique(feed[name])) <= {0, 1}
            assert (feed[name].sum(axis=1) > 0).all()
            assert feed[name][0].all()
    assert all(info.random_inputs(rng, padded=False)[n].all() for n in ("attention_mask", "encoder_attention_mask"))


def test_same_options_same_weights(tmp_path: Path) -> None:
    options = ExportOptions("gpt2", layers=1)
    for name in ("a", "b"):
        export_model(options, tmp_path / f"{name}.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_float16(tmp_path: Path) -> None:
    info = export_model(ExportOptions("bert", dtype="fp16", attention="eager", layers=1), tmp_path / "m.onnx")
    weights = {t.data_type for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer if len(t.dims) == 2}
    assert weights == {onnx.TensorProto.FLOAT16}
    assert info.sites[0].mask is None


@pytest.mark.parametrize(("exporter", "opset"), [("torchscript", 17), ("dynamo", 18)])
def test_external_data(exporter: str, opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stof_models.export.EXTERNAL_DATA_ABOVE", 0)
    path = tmp_path / "bert.onnx"
    info = export_model(ExportOptions("bert", exporter=exporter, opset=opset, layers=1), path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bert.json", "bert.onnx", "bert.onnx.data"]
    assert path.stat().st_size < (tmp_path / "bert.onnx.data").stat().st_size
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert np.isfinite(session.run(None, info.random_inputs(np.random.default_rng(0)))[0]).all()


def test_impossible_variants() -> None:
    for name, arguments, message in (
        ("swin", {"mask": "causal"}, "takes no mask"),
        ("vit", {"padding": True}, "takes no attention_mask"),
        ("vit", {"dynamic": "sequence"}, "part of the model"),
        ("bert", {"cross_mask": "window"}, "no cross attention"),
        ("gemma2", {"attention": "sdpa"}, "no sdpa attention"),
    ):
        with pytest.raises(ExportError, match=message):
            export_model(ExportOptions(name, **arguments), Path("unused.onnx"))
    for arguments, message in (
        ({"hidden": 65}, "not a multiple"),
        ({"heads": 4, "kv_heads": 3}, "key/value heads"),
        ({"layers": 0}, "at least 1"),
        ({"mask": "triangle"}, "unknown mask"),
        ({"mask": "per-head", "mask_style": "function"}, "sees no heads"),
    ):
        with pytest.raises(ExportError, match=message):
            ExportOptions("bert", **arguments)


def test_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        (tmp_path / "seen").write_text("", encoding="utf-8")
        raise RuntimeError("no such operator\nlong graph")

    monkeypatch.setattr("stof_models.export._export", fail)
    with pytest.raises(ExportError, match=r"torchscript exporter failed: RuntimeError: no such operator$"):
        export_model(ExportOptions("bert", layers=1), tmp_path / "bert.onnx")
    assert [p.name for p in tmp_path.iterdir()] == ["seen"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit", "--seq", "60"], "should be 49 or 64"),
        (["bert", "--opset", "30"], "opsets 11 to 20"),
        (["bert", "--hidden", "30"], "not a multiple"),
        (["bert", "-o", "/no/such/folder/bert.onnx"], "does not exist"),
    ],
)
def test_command_line_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.onnx"
    arguments = ["gpt2", "--mask", "bigbird", "--block", "16", "--seq", "100", "--layers", "1", "-o", str(path)]
    assert cli.main(arguments) == 0
    assert "1 attention sites" in capsys.readouterr().out
    mask = ExportInfo.load(info_path(path)).sites[0].mask
    assert mask is not None
    assert (mask.kind, mask.block, mask.causal, mask.seq_q) == ("bigbird", 16, True, 100)
