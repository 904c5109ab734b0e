// What the two adapters share of TensorRT's own types, which V2 and V3 have in common.
#pragma once
#include <string>
#include <vector>

#include "NvInfer.h"
#include "attention_core.h"

namespace stof {

constexpr char kPluginName[] = "StofAttention";
constexpr char kPluginVersion[] = "1";
constexpr char kPluginNamespace[] = "stof";

inline ElementType element_type(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kHALF: return ElementType::kF16;
    case nvinfer1::DataType::kFLOAT: return ElementType::kF32;
    case nvinfer1::DataType::kINT32: return ElementType::kI32;
#if NV_TENSORRT_MAJOR >= 10
    case nvinfer1::DataType::kBF16: return ElementType::kBF16;
#endif
    default: return ElementType::kOther;
  }
}

inline TensorDesc tensor_desc(const nvinfer1::Dims& dims, nvinfer1::DataType type) {
  TensorDesc t{element_type(type), dims.nbDims < 0 ? 0 : dims.nbDims > 8 ? 8 : dims.nbDims, {}};
  for (int32_t i = 0; i < t.rank; ++i) t.dims[i] = dims.d[i];
  return t;
}

// Descriptions of `n` inputs.
struct InputDescs {
  TensorDesc tensors[kMaxInputs];
  int32_t count;
  InputDescs(const nvinfer1::PluginTensorDesc* in, int32_t n) : count(n < kMaxInputs ? n : kMaxInputs) {
    for (int32_t i = 0; i < count; ++i) tensors[i] = tensor_desc(in[i].dims, in[i].type);
  }
  // At the largest shapes of the optimization profile (`desc` has them only where they are static).
  InputDescs(const nvinfer1::DynamicPluginTensorDesc* in, int32_t n) : count(n < kMaxInputs ? n : kMaxInputs) {
    for (int32_t i = 0; i < count; ++i) tensors[i] = tensor_desc(in[i].max, in[i].desc.type);
  }
};

// More than any GPU has: TensorRT drops what asks for it, since getWorkspaceSize has no other way to say no. A size of 0
// would let a kernel write into its neighbours' workspace.
constexpr size_t kNoWorkspaceIsEnough = size_t{1} << 46;

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

// The attributes a creator declares to the ONNX parser.
class FieldList {
 public:
  FieldList() {
    for (int32_t i = 0; i < field_count(); ++i) {
      const Field::Kind kind = field_kind(i);
      const auto type = kind == Field::Kind::kFloat ? nvinfer1::PluginFieldType::kFLOAT32
                        : kind == Field::Kind::kInt ? nvinfer1::PluginFieldType::kINT32
                                                    : nvinfer1::PluginFieldType::kCHAR;
      fields_.emplace_back(field_name(i), nullptr, type, kind == Field::Kind::kText ? 0 : 1);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
  }
  const nvinfer1::PluginFieldCollection* get() const { return &collection_; }

 private:
  std::vector<nvinfer1::PluginField> fields_;
  nvinfer1::PluginFieldCollection collection_{};
};

// The node's configuration from the attributes TensorRT hands over. nullptr, or what is wrong with them, in `error`.
inline const char* read_collection(const nvinfer1::PluginFieldCollection* fc, AttentionConfig& config, char* error, size_t size) {
  std::vector<Field> fields;
  std::vector<int32_t> narrowed;
  const int32_t n = fc && fc->fields ? fc->nbFields : 0;
  narrowed.reserve(static_cast<size_t>(n > 0 ? n : 0));  // pointers into it stay valid
  for (int32_t i = 0; i < n; ++i) {
    const nvinfer1::PluginField& f = fc->fields[i];
    Field field{f.name, Field::Kind::kOther, f.data, f.length};
    if (f.type == nvinfer1::PluginFieldType::kFLOAT32) field.kind = Field::Kind::kFloat;
    if (f.type == nvinfer1::PluginFieldType::kINT32) field.kind = Field::Kind::kInt;
    if (f.type == nvinfer1::PluginFieldType::kCHAR) field.kind = Field::Kind::kText;
#if NV_TENSORRT_MAJOR >= 10
    if (f.type == nvinfer1::PluginFieldType::kINT64 && f.length == 1 && f.data) {
      const int64_t wide = *static_cast<const int64_t*>(f.data);
      if (wide >= INT32_MIN && wide <= INT32_MAX) {
        narrowed.push_back(static_cast<int32_t>(wide));
        field.kind = Field::Kind::kInt;
        field.data = &narrowed.back();
      }
    }
#endif
    fields.push_back(field);
  }
  return read_fields(fields.data(), static_cast<int32_t>(fields.size()), config, error, size);
}

}  // namespace stof
