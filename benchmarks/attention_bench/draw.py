"""docs/attention.png and the table in docs/benchmarks.md, from the results file."""

from __future__ import annotations

from typing import Any

from .record import ROOT

BEGIN, END = "<!-- attention table: begin -->", "<!-- attention table: end -->"
PEERS = ("flex", "cudnn_mask", "cudnn_causal", "fa2_causal", "fa4")


def best_peer(line: dict[str, Any]) -> float | None:
    """The fastest peer's microseconds, or None where none ran."""
    return min((line["peers"][p] for p in PEERS if p in line["peers"]), default=None)


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown, one row a case: times in microseconds with a warm L2."""
    head = ["mask", "B,H,S,D", "density", "ours", "kernel", "cold L2", "floor", *PEERS, "best peer / ours"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    # A run of one kernel family alone is compared with the peers' times of the run that had them.
    measured = {x["case"]: x["peers"] for x in lines if x["peers"]}
    for x in ({**x, "peers": measured.get(x["case"], {})} for x in lines):
        best = best_peer(x)
        rows.append(
            "| "
            + " | ".join(
                [
                    x["mask"],
                    f"{x['B']},{x['Hq']},{x['Sq']},{x['D']}",
                    f"{x['density']:.3f}",
                    f"{x['ours_us']:.1f}",
                    f"{x['kernel']} {x['config']}",
                    "–" if x.get("ours_cold_us") is None else f"{x['ours_cold_us']:.1f}",
                    f"{x['floor_us']:.1f}",
                    *(f"{x['peers'][p]:.1f}" if p in x["peers"] else "–" for p in PEERS),
                    "–" if best is None else f"{best / x['ours_us']:.2f}",
                ]
            )
            + " |"
        )
    if lines:
        last = lines[-1]
        rows.append(
            f"\nLast line measured {last['date']} at commit {last['commit']} on {last['gpu']}, "
            f"driver {last['driver']}, torch {last['torch']}. Peers do not depend on our commit: "
            "where a run left one out, the time of the last run that had it stands."
        )
    return "\n".join(rows)


def draw(lines: list[dict[str, Any]]) -> None:
    """Writes both; replaces only what stands between the table's markers."""
    page = ROOT / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    page.write_text(f"{head}{BEGIN}\n{table(lines)}\n{END}{tail}", encoding="utf-8")
    plot([x for x in lines if best_peer(x) is not None])


def plot(lines: list[dict[str, Any]]) -> None:
    """Bars: the best peer's time over ours, per case, and over the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"{x['mask']} ({x['B']},{x['Hq']},{x['Sq']},{x['D']})" for x in lines]
    gain = [(best_peer(x) or 0) / x["ours_us"] for x in lines]
    room = [(best_peer(x) or 0) / x["floor_us"] for x in lines]
    fig, ax = plt.subplots(figsize=(9, 0.28 * len(lines) + 1.2))
    at = range(len(lines))
    ax.barh(at, room, color="0.88", label="fair floor")
    ax.barh(at, gain, height=0.5, color=["tab:green" if g >= 1 else "tab:red" for g in gain], label="ours")
    ax.axvline(1, color="black", lw=0.8)
    ax.set_xscale("log")
    ax.set_yticks(list(at), labels, fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("speed relative to the best peer on the same mask (log)")
    ax.legend(fontsize=7, loc="lower right")
    fig.tight_layout()
    fig.savefig(ROOT / "docs" / "attention.png", dpi=130)
