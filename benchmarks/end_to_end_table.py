"""The end-to-end tables of docs/benchmarks.md, from benchmarks/results/end_to_end.jsonl.

    python -m benchmarks.end_to_end_table [--add FILE ...]

`--add` appends the lines of files that another machine wrote: of benchmarks.end_to_end and benchmarks.real_models as
they are, of benchmarks.compile_peer and benchmarks.compile_models as `compile_ms` (and `err_compile`) of the lines of
the encoder or model with that mask and size.
Lines that report a failure are left out and named. The newest line of a case counts; a peer's time stays until it is
measured anew.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "end_to_end.jsonl", ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- end-to-end table: begin -->", "<!-- end-to-end table: end -->"
ENCODER = "encoder-768"
_KEY = ("model", "mask", "B", "S", "layers", "precision", "fusion")  # and "half_io", where it is
_PEER = ("compile_ms", "err_compile", "torch")

Line = dict[str, Any]


def combined(lines: Iterable[Line]) -> tuple[list[Line], list[str]]:
    """Result lines with the peer's figures in them, and what failed."""
    results: list[Line] = []
    peers: dict[tuple[Any, ...], Line] = {}
    failed = []
    for line in lines:
        if "failed" in line:
            failed.append(f"{line.get('model') or line.get('mask')}: {line['failed']}")
        elif "mode" in line:
            at = line.get("model", ENCODER), line["mask"], line["B"], line["S"], line["layers"]
            if at not in peers or line["compile_ms"] < peers[at]["compile_ms"]:
                peers[at] = line
        else:
            results.append(line)
    for line in results:
        peer = peers.get(tuple(line[name] for name in ("model", "mask", "B", "S", "layers")), {})
        line |= {name: peer[name] for name in _PEER if name in peer}
    return results, failed


def newest(lines: Iterable[Line]) -> list[Line]:
    """The last line of each case, in order of first appearance; with the peer's time of an earlier one if need be."""
    last: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        key = (*(line[name] for name in _KEY), line.get("half_io", False))
        kept = {name: value for name, value in last.get(key, {}).items() if name in _PEER}
        last[key] = {**kept, **line}
    return list(last.values())


def table(lines: Sequence[Line]) -> str:
    """Markdown: the encoder by mask and size, then the exported models."""
    parts = []
    encoder = "The encoder (hidden 768, 12 heads) of `benchmarks/end_to_end.py`:"
    exports = "`stof-onnx optimize --engine` on exports (hidden 768, 12 heads), by `benchmarks/real_models.py`:"
    for title, is_encoder in ((encoder, True), (exports, False)):
        if some := [x for x in lines if (x["model"] == ENCODER) == is_encoder and not x["fusion"]]:
            parts += [title, "", *_rows(some), ""]
    if some := [x for x in lines if x["fusion"]]:
        title = "With fused regions, three engines of one sitting (encoder: `benchmarks/fusion_columns.py`; exports:"
        title += " `benchmarks/real_models.py --initial-plan`):"
        parts += [title, "", *_columns(some), ""]
    parts += _layers(lines)
    sources = sorted({(x["gpu"], x["trt"], x["tactic_sources"]) for x in lines})
    for gpu, trt, tactics in sources:
        parts.append(f"{gpu}, TensorRT {trt}, tactic sources {tactics} on both sides. ")
    return "\n".join(parts).strip()


def _rows(lines: Sequence[Line]) -> Iterable[str]:
    peer = any("compile_ms" in line for line in lines)
    yield (
        "| model, mask | B,S | layers | plain ms | stof ms | plain / stof | kept |"
        + (" compile ms | compile / stof |" if peer else "")
        + " rel. error plain, stof | memory MiB plain, stof | mask bytes, dense | kernel | measured |"
    )
    yield "|" + "---|" * (14 if peer else 12)
    for x in sorted(lines, key=_order):
        cells = [_name(x), f"{x['B']},{x['S']}", str(x["layers"])]
        cells += [_number(x["plain_ms"]), _number(x["stof_ms"]), _number(x["speedup"], 3), x["kept"]]
        if peer:
            known = x.get("compile_ms")
            cells += [_number(known), _number(known and x["stof_ms"] and known / x["stof_ms"], 3)]
        cells.append(f"{_error(x['err_plain'])}, {_error(x['err_stof'])}")
        cells.append(", ".join(f"{x[name]:.0f}" if x[name] else "–" for name in ("plain_mem_mb", "stof_mem_mb")))
        cells.append(f"{x['mask_bytes']:,}, {x['dense_mask_bytes']:,}")
        cells += [x["kernel"] or "–", f"{x['date'][:10]} {x['commit']}"]
        yield "| " + " | ".join(cells) + " |"


def _columns(lines: Sequence[Line]) -> Iterable[str]:
    """Plain, attention only, attention and regions; torch.compile; the geometric mean of what regions gain."""
    yield (
        "| model, mask | B,S | plain ms | attention ms | + regions ms | attention / regions | plain / regions | kept |"
        " compile ms | compile / best | rel. error plain, regions | measured |"
    )
    yield "|" + "---|" * 12
    for x in sorted(lines, key=_order):
        times = x["plain_ms"], x["attention_ms"], x["stof_ms"]
        cells = [_name(x), f"{x['B']},{x['S']}", *map(_number, times)]
        cells += [_number(x["gain"], 3), _number(x["speedup"], 3), x["kept"]]
        known, best = x.get("compile_ms"), min(t for t in times if t is not None)
        cells += [_number(known), _number(known and known / best, 3)]
        cells += [f"{_error(x['err_plain'])}, {_error(x['err_stof'])}", f"{x['date'][:10]} {x['commit']}"]
        yield "| " + " | ".join(cells) + " |"
    gains = [math.log(x["gain"]) for x in lines if x["gain"]]
    if gains:
        mean = math.exp(sum(gains) / len(gains))
        yield ""
        yield f"Geometric mean of attention / regions over these {len(gains)}: {mean:.3f}."


def _order(x: Line) -> tuple[object, ...]:
    return -x["B"] * x["S"], -x["S"], x["model"]


def _name(x: Line) -> str:
    name: str = x["mask"] if x["model"] == ENCODER else x["model"]
    return name + (", fp16 in and out" if x.get("half_io") else "")


def _layers(lines: Sequence[Line]) -> list[str]:
    """Where the time goes at the largest batch that layers were timed at: plain and stof, of each mask."""
    timed = [x for x in lines if x["model"] == ENCODER and x.get("layers_us") and not x["fusion"]]
    if not timed:
        return []
    batch, seq = max((x["B"], x["S"]) for x in timed)
    parts = [f"Layers of the encoder's engines at {batch},{seq}, microseconds by TensorRT's profiler (from 1 on):", ""]
    for x in (x for x in timed if (x["B"], x["S"]) == (batch, seq)):
        for kind, layers in (("plain", x.get("plain_layers_us", {})), ("stof", x["layers_us"])):
            if layers and (kind == "stof" or x.get("plain_mask", x["mask"]) == x["mask"]):
                shown = ", ".join(f"`{name}` {us:.0f}" for name, us in layers.items() if us >= 1)
                parts.append(f"- {x['mask']}, {kind}: {shown}")
    return [*parts, ""]


def _number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def read(path: Path) -> list[Line]:
    """All lines, oldest first; none when there is no file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def main() -> None:
    """Appends what is given, and writes the table into docs/benchmarks.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", type=Path, nargs="+", default=[], metavar="FILE")
    arguments = parser.parse_args()
    added, failed = combined(line for path in arguments.add for line in read(path))
    for text in failed:
        print(f"left out: {text}")
    if added:
        with RESULTS.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in added)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(newest(read(RESULTS)))}\n{END}{after}")
    print(f"{len(added)} lines added; {PAGE.name} written")


if __name__ == "__main__":
    main()
