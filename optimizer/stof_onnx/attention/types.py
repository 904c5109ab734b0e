"""What the attention steps hand to each other. Values only: no graph is edited here."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    import onnx_graphsurgeon as gs
    from stof_onnx.mask.encoded import EncodedMask


class Layout(str, enum.Enum):
    """How one of Q, K, V, O lies in memory (the last axis is always contiguous).

    BHSD is [B, H, S, D]. BSHD is [B, S, H, D] or, the same bytes, [B, S, H*D]; an output in BSHD is always written
    as [B, S, H*Dv]. PACKED exists only after lowering: one [B*S, (Hq + 2*Hkv)*D] tensor holds Q, K and V.
    """

    BHSD = "BHSD"
    BSHD = "BSHD"
    PACKED = "packed"


class BiasKind(str, enum.Enum):
    """none; dense [1|B, 1|H, Sq, Skv]; relative [1|H, Rq+Rk-1], entry k - q + Rq - 1 (attribute rel_rq = Rq)."""

    NONE = "none"
    DENSE = "dense"
    RELATIVE = "relative"


class KvKind(str, enum.Enum):
    """Padding known only at run time: none, mask [B, Skv] int32 (1 = attend), or length [B] int32."""

    NONE = "none"
    MASK = "mask"
    LENGTH = "length"


class MaskedRow(str, enum.Enum):
    """What a row that sees no key yields (DESIGN.md, `masked_row`)."""

    ZERO = "zero"  # zeros
    MEAN = "mean"  # the plain mean of V over all S_kv
    SCORES = "scores"  # the softmax of the raw scores: every score was shifted alike
    NAN = "nan"  # NaN


@dataclass(frozen=True)
class Refusal:
    """Why a site, or a step of it, was left alone. A value for the report, never an exception."""

    reason: str
    nodes: tuple[str, ...] = ()
    site: str = ""


@dataclass(frozen=True)
class BiasTerm:
    """An exact additive term of the scores: `array` when it is known offline, else the run-time `tensor`.

    A dense `tensor` may have fewer axes than four (they broadcast from the right), fewer keys than S_kv (the missing
    ones are hidden), and may be bool (True = attend: 0 where True, -inf elsewhere). A key whose bias is -inf is hidden
    like a masked one: a row left without keys by mask, padding and dense bias together yields `masked_row`.
    `shape` and `dtype` of `tensor` count only where it does not know its own (sizes: the largest).
    """

    kind: BiasKind
    array: np.ndarray | None = None
    tensor: gs.Tensor | None = None
    rel_rq: int = 0
    shape: tuple[int, ...] | None = None
    dtype: np.dtype | None = None


@dataclass(frozen=True)
class KvMask:
    """Run-time key padding: `tensor` is [B, Skv] (mask; also [B, 1, 1, Skv]) or [B] (length) of any integer, bool
    or float dtype.

    `invert` is True when a non-zero entry means "do not attend".
    """

    kind: KvKind
    tensor: gs.Tensor | None = None
    invert: bool = False


@dataclass(frozen=True)
class ScoreTerm:
    """One step between Q @ K^T and the softmax (or between the softmax and its use), in graph order.

    kind:
        add    scores + value (a Sub is an add with `negate`)
        where  value ? scores : fill (`keep` True) or value ? fill : scores (`keep` False)
        mul    scores * value: a 0/1 mask of old decoders, or a uniform factor after a mask
        cast   the scores change to `dtype`
    The value is `tensor`, or `build(batch, heads, s_q, s_kv)` for terms that no tensor holds (is_causal), which
    broadcasts to [B, H, Sq, Skv]. `fill` of a where is a number, or `fill_tensor` where it varies.
    `dtype` is the dtype that the step computes in. `view` is the scores tensor at that step when its axes are not
    [B, H, Sq, Skv] but a reshape of it (rank 3 cores, windows); `tensor` broadcasts against that shape.
    """

    kind: str
    dtype: np.dtype
    tensor: gs.Tensor | None = None
    build: Callable[[int, int, int, int], np.ndarray] | None = None
    keep: bool = True
    fill: float | None = None
    fill_tensor: gs.Tensor | None = None
    negate: bool = False
    view: gs.Tensor | None = None
    node: gs.Node | None = None
    stable: bool = False  # an entry of `build` does not depend on the sizes
    axes: tuple[int, ...] | None = None  # which of [B, H, Sq, Skv] each axis of `tensor` is; None: right-aligned


@dataclass(frozen=True)
class ScoreSite:
    """The scores of one attention: what mask recovery has to know beside the terms.

    batch, heads, seq_q, seq_kv are those of the scenario in which everything is encoded (the largest sizes).
    `nan_guard`: the graph turns NaN probabilities into 0 (Where(IsNaN(p), 0, p)).
    """

    name: str
    batch: int
    heads: int
    seq_q: int
    seq_kv: int
    dtype: np.dtype  # of the raw scores
    softmax_dtype: np.dtype
    nan_guard: bool = False
    batch_dynamic: bool = False
    seq_dynamic: bool = False
    assume_no_empty_rows: bool = False
    probe_sizes: tuple[tuple[int, int, int, int], ...] = ()  # (B, H, Sq, Skv) in each probe of `folder.family`


@dataclass(frozen=True)
class Recovered:
    """Terms sorted out: softmax(scale_factor * scores + bias over the keys that mask and kv_mask allow)."""

    mask: EncodedMask | None
    bias: BiasTerm
    kv_mask: KvMask
    masked_row: MaskedRow
    scale_factor: float = 1.0
    notes: tuple[str, ...] = ()
    score_bound: float = math.inf  # largest |score| under which the finite mask constants are masks (inf: none are)


@dataclass(frozen=True)
class NewNode:
    """A standard operator to be put ahead of a replacement. Its outputs are variables that no graph knows yet."""

    op: str
    inputs: tuple[gs.Tensor, ...]
    outputs: tuple[gs.Tensor, ...]
    attrs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class AttentionMatch:
    """One masked attention found in the graph and proven equal to `StofAttention` with these inputs.

    The scores are `softcap(scale * Q @ K^T) + bias` over the allowed keys; softcap(x) = c*tanh(x/c), off at 0.
    q, k, v, output are tensors of `graph` (the main graph, a subgraph body or a function); each has its own layout.
    `nodes` are the nodes the replacement makes unnecessary, in graph order (dead nodes upstream are swept later).
    `ranks` of q, k, v count only where a tensor's own `.shape` is None (BSHD tensors have rank 4 or 3).
    `prelude` makes tensors the graph does not hold yet (an operator's own projections), in order.
    """

    name: str
    graph: gs.Graph
    q: gs.Tensor
    k: gs.Tensor
    v: gs.Tensor
    output: gs.Tensor
    q_layout: Layout
    k_layout: Layout
    v_layout: Layout
    o_layout: Layout
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    seq_q: int  # the maximum, where the axis is dynamic; 0 where nothing bounds it (then there is no static mask)
    seq_kv: int
    dynamic_seq: bool
    dtype: np.dtype
    scale: float
    softcap: float = 0.0
    mask: EncodedMask | None = None  # None: every key is allowed
    bias: BiasTerm = field(default_factory=lambda: BiasTerm(BiasKind.NONE))
    kv_mask: KvMask = field(default_factory=lambda: KvMask(KvKind.NONE))
    masked_row: MaskedRow = MaskedRow.ZERO
    nodes: tuple[gs.Node, ...] = ()
    ranks: tuple[int, int, int] = (4, 4, 4)
    output_rank: int = 3  # in BSHD: 3, or 2 where `output` is [B*Sq, H*Dv] and a Reshape has to follow the node
    prelude: tuple[NewNode, ...] = ()
    notes: tuple[str, ...] = ()  # lines for the report
    score_bound: float = math.inf  # largest |score| under which the finite mask constants are masks; verify checks it
