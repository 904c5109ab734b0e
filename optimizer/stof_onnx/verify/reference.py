"""The original in higher precision, run only when a difference needs a judge."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import onnx

from stof_onnx.errors import StofError
from stof_onnx.graph.external import tensor_nbytes
from stof_onnx.verify.session import Runner
from stof_onnx.verify.upcast import upcast, upcast_feeds

_WEIGHTS_LIMIT = 900 << 20  # bytes of weights; twice that must fit one protobuf message
_MISSING = re.compile(r"implementation for (\w+)\(|operator \((\w+)\)")
_ATTEMPTS = 8
_MADE_OF = {"Erf": "Gelu"}  # an operator that the runtime expands, by the part that it then misses


class Reference:
    """Makes the higher-precision session on first use; `note` says why there is none."""

    def __init__(self, proto: onnx.ModelProto, base_dir: Path, extra_outputs: Iterable[str]) -> None:
        self._proto = proto
        self._base_dir = base_dir
        self._extra = list(extra_outputs)
        self._runner: Runner | None = None
        self._dtypes: dict[str, int] = {}
        self.note = ""

    def of(self, feeds: dict[str, np.ndarray]) -> Callable[[], dict[str, np.ndarray] | None]:
        """The outputs for `feeds`, computed when first called; None where no higher precision is possible."""
        done: list[dict[str, np.ndarray] | None] = []

        def outputs() -> dict[str, np.ndarray] | None:
            if not done:
                done.append(self._run(feeds))
            return done[0]

        return outputs

    def _run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
        if self._runner is None and not self.note:
            self._start()
        if self._runner is None:
            return None
        try:
            return self._runner.run(upcast_feeds(feeds, self._dtypes.__getitem__))
        except StofError as error:
            self.note = f"no run in higher precision: {error.what}"
            return None

    def _start(self) -> None:
        if sum(tensor_nbytes(t) for t in self._proto.graph.initializer) > _WEIGHTS_LIMIT:
            self.note = "no run in higher precision: the weights are too large for it"
            return
        without: frozenset[str] = frozenset()
        for _ in range(_ATTEMPTS):
            model = upcast(self._proto, self._base_dir, without)
            self._dtypes = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
            try:
                self._runner = Runner(model, self._base_dir, self._extra)
                return
            except StofError as error:
                found = _MISSING.search(error.what)
                missing = next((g for g in found.groups() if g), "") if found else ""
                if missing in without:
                    missing = _MADE_OF.get(missing, "")
                if not missing or missing in without:
                    self.note = f"no run in higher precision: {error.what}"
                    return
                without |= {missing}
        self.note = "no run in higher precision: too many operators lack it"
