// What the two adapters of StofAttention share.
#pragma once
#include "adapter.h"
#include "attention_core.h"
#include "log.h"

namespace stof {

constexpr char kAttentionName[] = "StofAttention";

// Shape of O from the shapes of the inputs; false where their ranks do not fit the layout.
inline bool output_shape(const AttentionConfig& c, const nvinfer1::DimsExprs* in, int32_t n, nvinfer1::IExprBuilder& b,
                         nvinfer1::DimsExprs& out) {
  using nvinfer1::DimensionOperation;
  const auto times = [&](const nvinfer1::IDimensionExpr* x, int32_t factor) {
    return b.operation(DimensionOperation::kPROD, *x, *b.constant(factor));
  };
  if (n < 1) return false;
  if (c.packed()) {
    if (in[0].nbDims != 2) return false;
    out.nbDims = 2;
    out.d[0] = in[0].d[0];
    out.d[1] = b.constant(int64_t{c.num_heads} * c.v_head_dim);
    return true;
  }
  if (n < 3) return false;
  const nvinfer1::DimsExprs &q = in[0], &v = in[2];
  const bool q_bhsd = c.layout_of(kQ) == Layout::kBHSD;
  if ((q_bhsd && q.nbDims != 4) || (q.nbDims != 3 && q.nbDims != 4) || (v.nbDims != 3 && v.nbDims != 4)) return false;
  const nvinfer1::IDimensionExpr* const batch = q.d[0];
  const nvinfer1::IDimensionExpr* const seq = q_bhsd ? q.d[2] : q.d[1];
  const bool folded = v.nbDims == 3;  // [B, S, Hkv * Dv]
  if (c.layout_of(kO) == Layout::kBHSD) {
    const auto* dv = folded ? b.operation(DimensionOperation::kFLOOR_DIV, *v.d[2], *b.constant(c.num_kv_heads)) : v.d[3];
    out.nbDims = 4;
    out.d[0] = batch;
    out.d[1] = b.constant(c.num_heads);
    out.d[2] = seq;
    out.d[3] = dv;
  } else {
    out.nbDims = 3;
    out.d[0] = batch;
    out.d[1] = seq;
    out.d[2] = folded ? times(v.d[2], c.num_heads / c.num_kv_heads) : times(v.d[3], c.num_heads);
  }
  return true;
}

class AttentionFieldList final : public FieldList {
 public:
  AttentionFieldList() : FieldList(field_count(), field_name, field_kind) {}
};

// The node's configuration from the attributes TensorRT hands over. nullptr, or what is wrong with them, in `error`.
inline const char* read_collection(const nvinfer1::PluginFieldCollection* fc, AttentionConfig& config, char* error, size_t size) {
  const Fields fields(fc);
  return read_fields(fields.data(), fields.count(), config, error, size);
}

}  // namespace stof
