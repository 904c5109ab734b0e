"""Inputs and outputs that polygraphy saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from polygraphy.comparator import RunResults
from polygraphy.json import load_json

from stof_onnx.errors import StofError
from stof_onnx.files import check_source
from stof_onnx.verify.samples import Sample


def loaded_outputs(path: Path, names: Sequence[str], count: int) -> list[dict[str, np.ndarray]]:
    """The `count` output sets of a polygraphy JSON file (as `polygraphy run --save-outputs` writes it).

    Raises:
        StofError: it is none, holds another number of sets, or lacks an output of `names`.
    """
    loaded = _load_polygraphy(path, "--save-outputs")
    if isinstance(loaded, RunResults):  # of several runners; the first one's iterations
        loaded = [dict(iteration.items()) for _, iterations in loaded.lst[:1] for iteration in iterations]
    sets = loaded if isinstance(loaded, list) else [loaded]
    if len(sets) != count:
        raise StofError(f"{len(sets)} sets of outputs for {count} of inputs", str(path), "Make both in one run")
    for number, outputs in enumerate(sets):
        if not isinstance(outputs, Mapping) or any(name not in outputs for name in names):
            raise StofError(
                f"set {number} does not hold the outputs {list(names)}", str(path), "Make it for this model"
            )
    return [{name: np.asarray(outputs[name]) for name in names} for outputs in sets]


def loaded_samples(path: Path, proto: onnx.ModelProto) -> list[Sample]:
    """The input sets of a polygraphy JSON file (as `polygraphy run --save-inputs` writes it).

    Raises:
        StofError: it is none, or not of this model.
    """
    loaded = _load_polygraphy(path, "--save-inputs")
    sets = loaded if isinstance(loaded, list) else [loaded]
    given = {t.name for t in proto.graph.initializer}
    wanted = [i.name for i in proto.graph.input if i.name not in given]
    samples = []
    for number, feeds in enumerate(sets):
        if not isinstance(feeds, Mapping) or any(name not in feeds for name in wanted):
            raise StofError(f"set {number} does not hold the inputs {wanted}", str(path), "Make it for this model")
        samples.append(Sample(f"{path.name}[{number}]", {n: np.asarray(feeds[n]) for n in wanted}))
    return samples


def _load_polygraphy(path: Path, option: str) -> Any:
    check_source(path)
    try:
        return load_json(str(path))
    except Exception as error:  # polygraphy raises several types
        raise StofError(f"not a polygraphy JSON file ({error})", str(path), f"Make it with {option}") from error
