"""What other machines measured, put together into one table."""

from __future__ import annotations

from typing import Any

from benchmarks.end_to_end_table import combined, newest, table


def line(**changes: Any) -> dict[str, Any]:
    base = {
        **{"date": "2026-11-30T20:00:00+00:00", "commit": "abc", "gpu": "NVIDIA H200", "trt": "8.6.0"},
        **{"tactic_sources": "default", "model": "encoder-768", "mask": "window", "B": 16, "S": 2048, "layers": 2},
        **{"precision": "fp16", "fusion": False, "plain_ms": 6.0, "stof_ms": 2.0, "speedup": 3.0, "kept": "stof"},
        **{"plain_mem_mb": 900.0, "stof_mem_mb": 300.0, "err_plain": 1e-3, "err_stof": 2e-3, "mask_bytes": 5000},
        **{"dense_mask_bytes": 8388608, "kernel": "block_sm90"},
    }
    return base | changes


PEER = {"mask": "window", "B": 16, "S": 2048, "layers": 2, "mode": "default", "compile_ms": 2.2, "err_compile": 1e-3}


def test_the_faster_mode_of_the_peer_joins_the_encoder_alone():
    slower = PEER | {"mode": "max-autotune", "compile_ms": 2.5, "torch": "2.11"}
    lines = [
        line(),
        line(S=4096),
        line(model="bert-window"),
        slower,
        PEER | {"torch": "2.11"},
        {"mask": "x", "failed": "no"},
    ]
    results, failed = combined(lines)
    assert failed == ["x: no"]
    assert [x.get("compile_ms") for x in results] == [2.2, None, None]


def test_peers_of_models_join_their_lines():
    peer = PEER | {"model": "bert-window", "compile_ms": 2.4}
    del peer["err_compile"]
    results, _ = combined([line(), line(model="bert-window"), line(model="bert-window", fusion=True), peer])
    assert [x.get("compile_ms") for x in results] == [None, 2.4, 2.4]


def test_three_columns_of_fused_regions():
    fused = line(fusion=True, stof_ms=1.6, attention_ms=2.0, gain=1.25, speedup=3.75, kept="fused", compile_ms=2.4)
    text = table([line(), fused, fused | {"B": 8, "gain": 0.8, "stof_ms": 2.5, "kept": "stof", "half_io": True}])
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert "| window | 16,2048 | 6 | 2 | 1.6 | 1.25 | 3.75 | fused | 2.4 | 1.5 | 1.0e-03, 2.0e-03 |" in rows[3]
    assert "| window, fp16 in and out | 8,2048 | 6 | 2 | 2.5 | 0.8 | 3.75 | stof | 2.4 | 1.2 |" in rows[4]
    assert rows[2].count("|") == rows[3].count("|")
    assert "over these 2: 1.000." in text


def test_the_newest_line_counts_and_keeps_the_peer():
    old, new = line(compile_ms=2.2, torch="2.11"), line(plain_ms=6.2, speedup=3.1)
    (kept,) = newest([old, new])
    assert (kept["plain_ms"], kept["compile_ms"]) == (6.2, 2.2)
    assert len(newest([old, line(fusion=True), line(B=8)])) == 3


def test_rows_say_what_was_measured():
    vit = line(model="vit", mask="none", stof_ms=None, speedup=None, kept="plain", err_stof=None, kernel="")
    text = table([line(compile_ms=2.2, torch="2.11"), vit])
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert "| window | 16,2048 | 2 | 6 | 2 | 3 | stof | 2.2 | 1.1 | 1.0e-03, 2.0e-03 | 900, 300 |" in rows[1]
    assert "| vit | 16,2048 | 2 | 6 | – | – | plain | 1.0e-03, – |" in rows[3]
    assert "5,000, 8,388,608 | block_sm90 | 2026-11-30 abc |" in rows[1]
    assert "Layers" not in text
    for head, row in ((0, 1), (2, 3)):
        assert rows[head].count("|") == rows[row].count("|")


def test_layers_of_the_largest_batch():
    layers = {"layers_us": {"a plugin": 75.4, "a reshape": 0.2}, "plain_layers_us": {"everything": 5900.0}}
    other = layers | {"mask": "causal", "plain_mask": "window"}
    text = table([line(**layers), line(B=8, S=4096, **layers), line(**other)])
    rows = [row for row in text.splitlines() if row.startswith("- ")]
    assert rows == [
        "- window, plain: `everything` 5900",
        "- window, stof: `a plugin` 75",
        "- causal, stof: `a plugin` 75",
    ]
    assert "at 16,2048" in text
