"""One match as the node contract (docs/architecture.md) sees it: function variants, mask arrays, attributes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from stof_onnx.attention.functions import AttentionVariant, Form, Geometry, MaskVariant
from stof_onnx.attention.types import AttentionMatch, BiasKind, BiasTerm, KvKind, Layout, MaskedRow
from stof_onnx.errors import StofError
from stof_onnx.mask import ONNX_INPUTS, EncodedMask, encode_bands, rows_without_keys
from stof_onnx.mask.sources import all_keys


class ContractSite:
    """What a match becomes. Raises StofError for tensors that no layout of the contract describes."""

    def __init__(self, match: AttentionMatch) -> None:
        self.match = match
        self.q = _form(match, match.q, match.q_layout, match.ranks[0])
        self.k = _form(match, match.k, match.k_layout, match.ranks[1])
        self.v = _form(match, match.v, match.v_layout, match.ranks[2])
        self.o = Form.BHSD if match.o_layout is Layout.BHSD else Form.BSH
        self.encoded = match.mask
        if self.encoded is None and match.seq_q and match.seq_kv:
            self.encoded = _every_key(match.seq_q, match.seq_kv)
        self._mask_variant = self._find_mask_variant()

    def arrays(self) -> dict[str, np.ndarray]:
        """The seven mask arrays; where nothing bounds the sequence, one dummy entry each."""
        if self.encoded is not None:
            return self.encoded.to_onnx_arrays()
        shapes = {"full_row_ptr": (1, 2), "part_row_ptr": (1, 2), "bitmap": (1, 8, 8, 2)}
        shapes |= {"row_order": (1, 1), "mask_index": (1, 1)}
        return {name: np.zeros(shapes.get(name, (1,)), np.int32) for name in ONNX_INPUTS}

    def attributes(self) -> dict[str, object]:
        match, mask = self.match, self.encoded
        layouts = [layout.value for layout in (match.q_layout, match.k_layout, match.v_layout, match.o_layout)]
        return {
            "scale": float(match.scale),
            "softcap": float(match.softcap),
            "num_heads": match.num_heads,
            "num_kv_heads": match.num_kv_heads,
            "tile_m": mask.tile_m if mask else 64,
            "tile_n": mask.tile_n if mask else 64,
            "layout": layouts[0] if len(set(layouts)) == 1 else ",".join(layouts),
            "bias_kind": match.bias.kind.value,
            "rel_rq": match.bias.rel_rq,
            "kv_kind": match.kv_mask.kind.value,
            "masked_row": match.masked_row.value,
            "mask_seq_q": mask.s_q if mask else 0,
            "mask_seq_kv": mask.s_kv if mask else 0,
        }

    def attention_variant(self) -> AttentionVariant:
        match, mask = self.match, self._mask_variant
        return AttentionVariant(
            self.q,
            self.k,
            self.v,
            self.o,
            match.num_heads,
            match.num_kv_heads,
            _element_type(match),
            match.softcap != 0,
            match.bias.kind,
            match.kv_mask.kind,
            has_mask=mask is not None,
            zero_rows=mask is not None and mask.empty_rows is MaskedRow.ZERO,
        )

    def mask_variant(self) -> MaskVariant | None:
        """The mask function that serves this site; None when its body needs no additive term, or only a dense bias."""
        return self._mask_variant

    def _find_mask_variant(self) -> MaskVariant | None:
        match = self.match
        bias, kv = match.bias.kind, match.kv_mask.kind
        bias_hides = match.masked_row in (MaskedRow.ZERO, MaskedRow.MEAN) and _may_hide(match.bias)
        if match.mask is None and kv is KvKind.NONE and bias is not BiasKind.RELATIVE and not bias_hides:
            return None
        sized = match.mask is not None or bias is BiasKind.RELATIVE
        may_be_empty = kv is not KvKind.NONE or bias_hides or (match.mask is not None and self._static_rows_empty())
        return MaskVariant(
            match.seq_q,
            match.seq_kv,
            Geometry.of(match.mask) if match.mask is not None else None,
            bias,
            match.bias.rel_rq,
            kv,
            match.masked_row if may_be_empty and match.masked_row is not MaskedRow.NAN else None,
            bias_hides,
            self.q if sized and self._dynamic(match.q, self.q) else None,
            self.k if (sized or kv is KvKind.LENGTH) and self._dynamic(match.k, self.k) else None,
            double=_element_type(match) == onnx.TensorProto.DOUBLE,
        )

    def _dynamic(self, tensor: gs.Tensor, form: Form) -> bool:
        """Whether the sequence axis of Q or K is known only at run time."""
        known = tensor.shape is not None and isinstance(tensor.shape[form.seq_axis], int)
        return self.match.dynamic_seq and not known

    def _static_rows_empty(self) -> bool:
        """Whether some row of the static mask sees no key. A shorter sequence may hide the only keys of a row."""
        mask = self.match.mask
        assert mask is not None
        return self.match.dynamic_seq or _hides_a_row(mask)


@lru_cache(maxsize=16)
def _every_key(seq_q: int, seq_kv: int) -> EncodedMask:
    """The mask that hides nothing: layers share it."""
    return encode_bands(all_keys(seq_q, seq_kv), seq_q, seq_kv)


@lru_cache(maxsize=16)
def _hides_a_row(mask: EncodedMask) -> bool:
    return any(rows_without_keys(mask, number).size for number in range(mask.n_masks))


def _form(match: AttentionMatch, tensor: gs.Tensor, layout: Layout, rank: int) -> Form:
    try:
        return Form.of(layout, rank if tensor.shape is None else len(tensor.shape))
    except ValueError as error:
        raise StofError(f"input '{tensor.name}': {error}", match.name, "Report this as a bug") from error


def _may_hide(bias: BiasTerm) -> bool:
    """Whether a dense bias may hold -inf."""
    if bias.kind is not BiasKind.DENSE:
        return False
    return bias.array is None or bool(np.isneginf(bias.array.astype(np.float32)).any())


def _element_type(match: AttentionMatch) -> int:
    return int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(match.dtype)))
