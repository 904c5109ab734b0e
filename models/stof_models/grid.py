"""A covering grid of exports: every pair of choices that can occur together occurs in some case.

The choices are the architecture, the exporter with its opset, eager or sdpa, the mask, how it enters, the cross mask,
run-time padding, dynamic axes and the dtype. Beyond pairs, the combinations of `TRIPLES` occur. Greedy with a fixed
seed, so the grid is the same everywhere.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from stof_models.errors import ExportError
from stof_models.families import FAMILIES
from stof_models.info import ExportInfo, info_path
from stof_models.masks import KINDS
from stof_models.options import ATTENTIONS, DTYPES, DYNAMIC, MASK_STYLES, NATIVE, ExportOptions

EXPORTS = (("torchscript", 17), ("dynamo", 18), ("dynamo", 23))
CROSS_MASKS = (NATIVE, "causal-br", "window", "random")
# Bottom-right causal is plain causal where S_q = S_kv, so it is only put into cross attention.
SELF_MASKS = (NATIVE, *(kind for kind in KINDS if kind != "causal-br"))
CANDIDATES = 40  # cases looked at for each one taken
SEED = 20
LONGEST = 80  # of dynamic sequences: a mask of several tiles with a ragged edge

# What decides together what the graph looks like is covered by triples.
TRIPLES = (
    ("family", "export", "attention"),
    ("family", "export", "dynamic"),
    ("mask", "export", "attention"),
    ("mask", "padding", "dynamic"),
    ("style", "export", "padding"),
    ("family", "mask", "attention"),
)

Choice = tuple[str, object]
Target = frozenset[Choice]


@dataclass(frozen=True)
class GridCase:
    """One export of the grid; `name` is unique and says what it is."""

    options: ExportOptions

    @property
    def name(self) -> str:
        o = self.options
        parts = [o.family, f"{ {'torchscript': 'ts', 'dynamo': 'dyn'}[o.exporter] }{o.opset}", o.attention, o.mask]
        if o.mask != NATIVE or o.cross_mask != NATIVE:
            parts.append(o.mask_style)
        if o.cross_mask != NATIVE:
            parts.append(f"cross.{o.cross_mask}")
        if o.padding:
            parts.append("padding")
        if o.dynamic != "none":
            parts.append(f"dynamic.{o.dynamic}")
        return "-".join([*parts, o.dtype])


@cache
def grid() -> tuple[GridCase, ...]:
    """All cases, in the order in which they were chosen: any prefix covers as much as it can."""
    rng = random.Random(SEED)
    possible = [choices for choices in _combinations() if _options(choices) is not None]
    uncovered = {target for choices in possible for target in _targets(choices)}
    by_target: dict[Target, list[int]] = {}
    for index, choices in enumerate(possible):
        for target in _targets(choices):
            by_target.setdefault(target, []).append(index)
    order = sorted(uncovered, key=lambda target: (len(by_target[target]), sorted(map(str, target))))
    cases: list[GridCase] = []
    for target in order:
        if target not in uncovered:
            continue
        indices = rng.sample(by_target[target], min(CANDIDATES, len(by_target[target])))
        best = max(indices, key=lambda index: len(uncovered & _targets(possible[index])))
        uncovered -= _targets(possible[best])
        options = _options(possible[best])
        assert options is not None
        cases.append(GridCase(options))
    return tuple(cases)


def subset(count: int) -> tuple[GridCase, ...]:
    """`count` cases of the grid that cover every single choice and as many pairs as they can, cheap ones first.

    TorchScript exports a tiny model in a fraction of the time that dynamo needs, so a dynamo case has to cover more.
    """
    cases = grid()
    rows = [_pairs(case) for case in cases]
    uncovered = set().union(*rows)
    unseen = {choice for pair in uncovered for choice in pair}
    cost = [1.0 if case.options.exporter == "torchscript" else 1.5 for case in cases]
    chosen: list[int] = []
    while len(chosen) < min(count, len(cases)):
        gains = [
            -1.0 if i in chosen else (len(row & uncovered) + 10 * len(frozenset().union(*row) & unseen)) / cost[i]
            for i, row in enumerate(rows)
        ]
        best = max(range(len(cases)), key=gains.__getitem__)
        chosen.append(best)
        uncovered -= rows[best]
        unseen -= frozenset().union(*rows[best])
    return tuple(cases[i] for i in chosen)


def export_case(case: GridCase, store: Path) -> tuple[Path, ExportInfo]:
    """The exported model of a case, and its declaration, from `store` or else exported into it.

    What the exporters' own sources decide is in the folder's name, so a changed exporter exports again.
    Raises ExportError when the exporter fails; the failure is kept, too.
    """
    from stof_models.export import export_model

    folder = store / _digest() / case.name
    model, failure = folder / "model.onnx", folder / "failure.txt"
    if failure.exists():
        raise ExportError(failure.read_text(encoding="utf-8"))
    if not model.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            export_model(case.options, model)
        except ExportError as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
    return model, ExportInfo.load(info_path(model))


@cache
def _digest() -> str:
    found = hashlib.sha256(f"{metadata.version('torch')} {metadata.version('transformers')}".encode())
    for name in ("export", "injection", "masks", "options", "info"):
        found.update((Path(__file__).parent / f"{name}.py").read_bytes())
    for source in sorted((Path(__file__).parent / "families").glob("*.py")):
        found.update(source.read_bytes())
    return found.hexdigest()[:12]


def _pairs(case: GridCase) -> set[Target]:
    o = case.options
    choices = {
        "family": o.family,
        "export": (o.exporter, o.opset),
        "attention": o.attention,
        "mask": o.mask,
        "style": o.mask_style,
        "cross": o.cross_mask,
        "padding": o.padding,
        "dynamic": o.dynamic,
        "dtype": o.dtype,
    }
    return {frozenset(pair) for pair in itertools.combinations(choices.items(), 2)}


def _combinations() -> Iterator[dict[str, object]]:
    values: dict[str, tuple[object, ...]] = {
        "family": tuple(FAMILIES),
        "export": EXPORTS,
        "attention": ATTENTIONS,
        "mask": SELF_MASKS,
        "style": MASK_STYLES,
        "cross": CROSS_MASKS,
        "padding": (False, True),
        "dynamic": DYNAMIC,
        "dtype": DTYPES,
    }
    for combination in itertools.product(*values.values()):
        yield dict(zip(values, combination, strict=True))


def _options(choices: dict[str, object]) -> ExportOptions | None:
    """The export of these choices; None where the architecture has no such variant or two names mean the same."""
    family = FAMILIES[str(choices["family"])]
    if choices["cross"] != NATIVE and not family.cross:
        return None
    if choices["mask"] == choices["cross"] == NATIVE and choices["style"] != MASK_STYLES[0]:
        return None
    exporter, opset = next(export for export in EXPORTS if export == choices["export"])
    try:
        options = ExportOptions(
            family=family.name,
            mask=str(choices["mask"]),
            cross_mask=str(choices["cross"]),
            mask_style=str(choices["style"]),
            exporter=exporter,
            opset=opset,
            attention=str(choices["attention"]),
            padding=bool(choices["padding"]),
            dynamic=str(choices["dynamic"]),
            dtype=str(choices["dtype"]),
            max_seq=LONGEST,
        )
    except ExportError:
        return None
    return options if not family.why_not(options) else None


def _targets(choices: dict[str, object]) -> set[Target]:
    """The pairs and triples that a case covers."""
    items = tuple(choices.items())
    native = choices["mask"] == choices["cross"] == NATIVE
    relevant = [item for item in items if not (native and item[0] == "style")]
    targets: set[Target] = {frozenset(pair) for pair in itertools.combinations(relevant, 2)}
    for names in TRIPLES:
        targets.add(frozenset((name, choices[name]) for name in names))
    return targets
