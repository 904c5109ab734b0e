"""How much memory a comparison takes, roughly and from above."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from stof_onnx.graph.external import tensor_nbytes
from stof_onnx.verify.compare import SiteProbe
from stof_onnx.verify.samples import Sample

_WEIGHT_COPIES = 3  # protobuf and session of the original, session of the optimized model
_MASK_COPIES = 6  # float32 mask, its boolean and index forms, on either side
_SCORE_COPIES = 4  # scores, masked scores, probabilities, and one temporary, each float32 or smaller


def whole_models(proto: onnx.ModelProto, sites: Sequence[SiteProbe], samples: Sequence[Sample]) -> int:
    """Bytes needed at the same time by whole models: the weights, and the score matrices of the largest attention."""
    weights = sum(tensor_nbytes(t) for t in proto.graph.initializer)
    batch = max((v.shape[0] for s in samples for v in s.feeds.values() if v.ndim), default=1)
    scores = max((s.num_heads * s.seq_q * s.seq_kv * 4 for s in sites), default=0)
    return _WEIGHT_COPIES * weights + _SCORE_COPIES * batch * scores


def sampled_rows(sites: Sequence[SiteProbe]) -> int:
    """Bytes needed to compare sites on sampled rows: the dense mask of the largest one, and what it is made of."""
    return _MASK_COPIES * max((s.seq_q * s.seq_kv * 4 for s in sites), default=0)
